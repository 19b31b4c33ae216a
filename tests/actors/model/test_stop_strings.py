"""Stop strings: the same cut however the text arrives."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.model.stop_strings import StopStringMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """All text that comes out, and the stop that matched."""
    matcher = StopStringMatcher(stops, include)
    out = []
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        out.append(emitted)
        if matched is not None:
            assert matcher.push("later") == ("", matched)
            break
    return "".join([*out, matcher.finish()]), matcher.matched


def first_match(stops: list[str], text: str) -> tuple[int, str] | None:
    """(end, stop) by the stated rule: earliest end, then longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def test_nothing_of_a_stop_that_spans_tokens_leaks() -> None:
    matcher = StopStringMatcher(["the end"])
    assert matcher.push("now t") == ("now ", None)
    assert matcher.push("he e") == ("", None)
    assert matcher.push("nd of it") == ("", "the end")


def test_text_held_back_comes_out_when_it_was_no_stop() -> None:
    matcher = StopStringMatcher(["abcd"])
    assert matcher.push("xabc") == ("x", None)
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == "abc"
    assert matcher.matched is None


def test_of_two_stops_the_one_that_ends_first_wins() -> None:
    for pieces in (["xabcd"], list("xabcd")):
        assert run(["abcd", "bc"], pieces) == ("xa", "bc")
        assert run(["abc", "ab"], pieces) == ("x", "ab")
        assert run(["bc", "abc"], pieces) == ("x", "abc")  # same end: the longest


def test_a_stop_at_position_zero_leaves_nothing() -> None:
    assert run(["\n\n", "!"], ["\n", "\nhello"]) == ("", "\n\n")


def test_the_stop_is_shown_once_when_asked_for() -> None:
    assert run(["end"], ["the e", "nd."], include=True) == ("the end", "end")


def test_without_stops_text_passes_unchanged() -> None:
    assert run([], ["a", "", "b"]) == ("ab", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])


def test_a_long_stop_costs_no_more_per_character() -> None:
    # A quadratic matcher would need minutes for this.
    stop = "a" * 50_000 + "b"
    assert run([stop], ["a"] * 60_000) == ("a" * 60_000, None)


ALPHABET = st.sampled_from("abé漢")
TEXTS = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


@given(stops=STOPS, text=TEXTS, cuts=st.sets(st.integers(0, 30)), include=st.booleans())
def test_every_split_gives_what_the_rule_says(
    stops: list[str], text: str, cuts: set[int], include: bool
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    expected = first_match(stops, text)
    if expected is None:
        assert run(stops, pieces, include) == (text, None)
    else:
        end, stop = expected
        assert run(stops, pieces, include) == (text[: end if include else end - len(stop)], stop)


@given(stops=STOPS, text=TEXTS)
def test_only_what_could_become_a_stop_is_held(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops)
    for char in text:
        _, matched = matcher.push(char)
        if matched is not None:
            return
    held = matcher.finish()
    assert not held or any(stop.startswith(held) for stop in stops)
