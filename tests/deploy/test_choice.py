"""Text does not depend on how tokens are grouped, nor on stops being looked for along the way."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.attention.messages import TokenLogprobs, TokenOutput
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.openai.choice import ChoiceText

IDS = st.lists(
    st.sampled_from([*b"abc\n", *"é漢".encode(), 260, 262, 319]), min_size=1, max_size=24
)
STOPS = st.lists(st.text("abcé漢", min_size=1, max_size=4), max_size=3)


def run(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stops: list[str], include: bool,
    logprobs: bool, finish: str,
) -> tuple[str, list[int], list[int], str | None, object]:  # fmt: skip
    """(text, counted ids, offsets, finish, stop reason) of ids given in pieces."""
    choice = ChoiceText(tokenizer, stops=stops, include_stop=include)
    text, counted, offsets = "", [], []
    edges = [0, *sorted({cut % len(ids) for cut in cuts} - {0}), len(ids)]
    for begin, end in itertools.pairwise(edges):
        piece = ids[begin:end]
        output = TokenOutput(
            request_id="r",
            token_ids=piece,
            logprobs=[TokenLogprobs(i, -1.0, 1, []) for i in piece] if logprobs else None,
            finish_reason=finish if end == len(ids) else None,  # type: ignore[arg-type]
        )
        delta = choice.feed(output)
        text += delta.text
        counted += delta.token_ids
        offsets += delta.offsets
        if delta.finish is not None:
            return text, counted, offsets, delta.finish, delta.stop_reason
    raise AssertionError("no finish")


@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("logprobs", [False, True])
@given(ids=IDS, cuts=st.lists(st.integers(0, 24), max_size=5), stops=STOPS, include=st.booleans())
def test_grouping_changes_nothing(
    tokenizer: Tokenizer, finish: str, logprobs: bool, ids: list[int], cuts: list[int],
    stops: list[str], include: bool,
) -> None:  # fmt: skip
    whole = run(tokenizer, ids, [], stops, include, logprobs, finish)
    assert run(tokenizer, ids, cuts, stops, include, logprobs, finish) == whole
    text, counted, offsets, ended, reason = whole
    visible = ids[:-1] if finish == "stop" and not include else ids
    full = tokenizer.decode(visible, skip_special=True)
    if isinstance(reason, str):
        assert ended == "stop" and reason in stops
        before = text.removesuffix(reason) if include else text
        assert full.startswith(before + reason) and (text.endswith(reason) or not include)
        # The match that ends first wins, so nothing before its last character matched.
        assert all(stop not in (before + reason)[:-1] for stop in stops)
    else:
        assert text == full and counted == ids
        assert all(stop not in text for stop in stops)
    if logprobs:
        assert len(offsets) == len(counted) and offsets == sorted(offsets)
