"""Finds stop strings in streamed text, however the text is cut into pieces.

The match that ENDS first wins; of those that end at the same character, the longest. This is the
only rule that needs no look-ahead, so that a stream stops at the same place as a whole text.
"""

from collections.abc import Sequence


class StopStringMatcher:
    """Holds back any suffix that could still become a stop string; emits everything else.

    One Knuth-Morris-Pratt automaton per stop string: the cost per character does not depend on the
    length of the stop strings.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """
        Args:
            stops: non-empty strings; none at all makes `push` the identity.
            include: emit the matched stop string itself (`include_stop_str_in_output`).
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        self._include = include
        self._stops = list(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # characters of each stop matched so far
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text now safe to show, and the stop string that has matched (None: go on).

        After a match nothing more comes out.
        """
        if self.matched is not None or not text:
            return "", self.matched
        if not self._stops:
            return text, None
        window = self._held + text
        for end in range(len(self._held) + 1, len(window) + 1):
            stop = self._advance(window[end - 1])
            if stop is not None:
                self.matched, self._held = stop, ""
                return window[: end if self._include else end - len(stop)], stop
        keep = len(window) - max(self._states)
        self._held = window[keep:]
        return window[:keep], None

    def finish(self) -> str:
        """The text held back, when the stream ends without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character; the longest stop string that ends with it. Last call if one does."""
        best: str | None = None
        for i, stop in enumerate(self._stops):
            state, borders = self._states[i], self._borders[i]
            while state and stop[state] != char:
                state = borders[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop) and (best is None or len(stop) > len(best)):
                best = stop
            self._states[i] = state
        return best


def _borders(stop: str) -> list[int]:
    """KMP failure function: length of the longest proper prefix that ends at each position."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = borders[length - 1]
        if stop[length] == stop[i]:
            length += 1
        borders[i] = length
    return borders
