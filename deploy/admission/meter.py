"""What one key has under way and has used of late, held against its limits."""

import math
from collections import deque

from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.openai.errors import ApiError

WINDOW_SECONDS = 60.0
# How long an answer is thought to be before any has been seen, and how much one changes the mean.
FIRST_ANSWER_TOKENS = 256.0
_MEAN_SHARE = 1 / 16


class Window:
    """A sum over the last minute, exactly: every amount leaves it one minute after it came."""

    def __init__(self) -> None:
        self._entries: deque[list[float]] = deque()  # [when, amount], oldest first
        self.total = 0.0

    def add(self, now: float, amount: float) -> list[float]:
        """The entry, for `change`."""
        self._forget(now)
        entry = [now, amount]
        self._entries.append(entry)
        self.total += amount
        return entry

    def _forget(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now - WINDOW_SECONDS:
            self.total -= self._entries.popleft()[1]

    def change(self, entry: list[float], amount: float) -> None:
        """What was only estimated is known. Without effect on an entry that has left."""
        if self._entries and entry[0] >= self._entries[0][0]:
            self.total += amount - entry[1]
            entry[1] = amount

    def seconds_until(self, now: float, most: float) -> float:
        """Until no more than `most` is in the window if nothing is added; 0: already."""
        self._forget(now)
        left, wait = self.total, 0.0
        for when, amount in self._entries:
            if left <= most:
                break
            left -= amount
            wait = when + WINDOW_SECONDS - now
        return wait


class Charge:
    """One request of a key: from its acceptance until its end."""

    def __init__(self, prompt: int, entry: list[float]) -> None:
        self.prompt, self.entry = prompt, entry


class Meter:
    """Of one key, by name, so that it outlives a new keys file.

    Tokens: the prompt counts when the request comes, once for each choice; the answer when it
    ends, and until then as long as this key's answers are on average.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._requests, self._tokens = Window(), Window()
        self._answer = FIRST_ANSWER_TOKENS

    def expected(self, limits: list[int]) -> int:
        """Tokens that answers of at most `limits` will have, all together."""
        return round(sum(min(limit, self._answer) for limit in limits))

    def check(self, key: ApiKey, now: float) -> None:
        """Raises ApiError 429 naming the limit of `key` that is reached."""
        if key.requests_in_flight is not None and self.in_flight >= key.requests_in_flight:
            what = f"have {key.requests_in_flight} requests under way"
            raise _over(key, what, "requests_in_flight_exceeded", 1)
        if (most := key.requests_per_minute) is not None:
            wait = self._requests.seconds_until(now, most - 1)
            if wait > 0:
                what = f"start {most} requests a minute"
                raise _over(key, what, "requests_per_minute_exceeded", wait)
        # The request that reaches this limit may exceed it: one that is larger than the limit by
        # itself would otherwise never be served.
        if (most := key.tokens_per_minute) is not None:
            wait = self._tokens.seconds_until(now, most - 1)
            if wait > 0:
                what = f"use {most} tokens a minute"
                raise _over(key, what, "tokens_per_minute_exceeded", wait)

    def begin(self, now: float, prompt: int, answer: int) -> Charge:
        """A request has come. `end` must follow."""
        self.in_flight += 1
        self._requests.add(now, 1)
        return Charge(prompt, self._tokens.add(now, prompt + answer))

    def end(self, charge: Charge, now: float, choices: int, answer: int | None) -> None:
        """answer: tokens of all choices; None: the request never ran."""
        self.in_flight -= 1
        self._tokens.change(charge.entry, 0 if answer is None else charge.prompt)
        if answer is not None:
            self._tokens.add(now, answer)
            self._answer += _MEAN_SHARE * (answer / choices - self._answer)


def _over(key: ApiKey, what: str, code: str, seconds: float) -> ApiError:
    message = f"the API key '{key.name}' may {what}"
    return ApiError(429, message, code=code, retry_after=max(1, math.ceil(seconds)))
