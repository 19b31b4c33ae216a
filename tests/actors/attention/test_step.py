"""What a plan becomes: rows, paths and the purpose of each logits row."""

from expertmesh.actors.attention.scheduler import Plan
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.attention.step import build_step
from tests.support.engines import request


def no_saves(*piece: object) -> tuple[tuple[int, int], ...]:
    return ()


def sequence(slot: int, prompt: int, generated: int, computed: int, end: int = 0,
             **params: object) -> Sequence:  # fmt: skip
    tokens = [100 * slot + i for i in range(prompt)]
    seq = Sequence(request(f"r{slot}", tokens, **params), slot, 0, frozenset())
    for i in range(generated):
        seq.append(1000 * slot + i)
    seq.slot, seq.pages, seq.computed, seq.chunk_end = slot, [slot], computed, end
    return seq


def test_rows_paths_and_logits() -> None:
    new = sequence(1, prompt=3, generated=2, computed=4)
    replayed = sequence(2, prompt=3, generated=3, computed=4)
    first_part = sequence(3, prompt=9, generated=0, computed=0, end=4)
    scored = sequence(4, prompt=6, generated=0, computed=2, end=6, prompt_logprobs=0)
    scored.prompt_logprobs = [None] * 3  # entries 0..2 are known
    recomputed = sequence(5, prompt=2, generated=1, computed=0, end=2, prompt_logprobs=0)
    recomputed.prompt_logprobs = [None] * 2
    counted = sequence(6, prompt=2, generated=0, computed=1, end=2, max_tokens=0)
    step = build_step(
        Plan([], [replayed, new], [first_part, scored, recomputed, counted]), no_saves
    )

    batch = step.batch
    assert batch.token_ids_T.tolist() == [
        1001, 2001, 300, 301, 302, 303, 402, 403, 404, 405, 500, 501, 601
    ]  # fmt: skip
    # Generated tokens take the decode path, replayed or not; prompt tokens never do.
    assert [(s.slot, s.row, s.length, s.position, s.decode) for s in batch.spans] == [
        (1, 0, 1, 4, True),
        (2, 1, 1, 4, True),
        (3, 2, 4, 0, False),
        (4, 6, 4, 2, False),
        (5, 10, 2, 0, False),
        (6, 12, 1, 1, False),
    ]
    assert [s.pages for s in batch.spans] == [[i] for i in range(1, 7)]
    # new's next token; prompt entries 3..5 of scored and then its next token.
    assert batch.logit_rows_R.tolist() == [0, 6, 7, 8, 9]
    assert step.sampled == [new, scored] and step.sample_rows == [0, 4]
    (rows,) = step.prompt_rows
    assert (rows.sequence, rows.begin, rows.end) == (scored, 1, 4)
    assert rows.tokens == [403, 404, 405]
    assert step.scored == [counted]
    assert not step.wants_routing


def test_one_prompt_token_is_no_decode() -> None:
    # D1: by what the token is, not by the length of its chunk.
    step = build_step(
        Plan([], [], [sequence(1, prompt=1, generated=0, computed=0, end=1)]), no_saves
    )
    assert [span.decode for span in step.batch.spans] == [False]
    assert step.sample_rows is None and len(step.sampled) == 1


def test_empty_plan() -> None:
    step = build_step(Plan(), no_saves)
    assert step.batch.rows == 0 and step.batch.logit_rows_R.tolist() == []
