"""From a plan to the batch the model runs, and what its logits rows are for."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import torch

from expertmesh.actors.attention.scheduler import Plan
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.model.batch import Batch, Span, prompt_tail


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logits rows begin..end of this step score the prompt tokens that follow them."""

    sequence: Sequence
    begin: int
    end: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """sampled[i] gets its next token from logits row sample_rows[i]; None = all rows, in order.

    spans: each planned sequence with its rows begin..end in the batch. scored: sequences whose
    prompt ends here and who want no token.
    """

    batch: Batch
    spans: list[tuple[Sequence, int, int]]
    sampled: list[Sequence]
    sample_rows: list[int] | None
    prompt_rows: list[PromptRows]
    scored: list[Sequence]
    wants_routing: bool


_slot = attrgetter("slot")


Saves = Callable[[Sequence, int, int], tuple[tuple[int, int], ...]]


def build_step(plan: Plan, saves: Saves) -> Step:
    """Decode rows first, prompt chunks after, logits rows ascending (Batch.split relies on it).

    saves: which snapshots a prompt piece leaves; see Span.
    """
    tokens: list[int] = []
    spans: list[Span] = []
    owners: list[tuple[Sequence, int, int]] = []
    logit_rows: list[int] = []
    sampled: list[Sequence] = []
    sample_rows: list[int] = []
    prompt_rows: list[PromptRows] = []
    scored: list[Sequence] = []
    routing = False
    # By slot: the KDA kernels update a run of neighbouring slots in place.
    for row, seq in enumerate(sorted(plan.decode, key=_slot)):
        at = seq.computed
        tokens.append(seq.tokens[at])
        spans.append(Span(seq.slot, row, 1, at, seq.pages, True, context=seq.context))
        owners.append((seq, row, row + 1))
        routing |= seq.params.want_routed_experts
        if at + 1 == len(seq.tokens):  # else a replayed token, whose successor is known
            sample_rows.append(len(logit_rows))
            logit_rows.append(row)
            sampled.append(seq)
    for seq in plan.prefill:
        row, begin, end = len(tokens), seq.computed, seq.chunk_end
        tokens += seq.tokens[begin:end]
        left = saves(seq, begin, end)
        tail = prompt_tail(seq.prompt_len)
        spans.append(
            Span(seq.slot, row, end - begin, begin, seq.pages, False, left, seq.context, tail)
        )
        owners.append((seq, row, row + end - begin))
        routing |= seq.params.want_routed_experts
        if seq.prompt_logprobs is not None:
            # Entry p is scored by row p - 1; those known from before a preemption are left out.
            first = max(begin, len(seq.prompt_logprobs) - 1)
            last = min(end, seq.prompt_len - 1)
            if first < last:
                at = len(logit_rows)
                logit_rows += range(row + first - begin, row + last - begin)
                following = seq.tokens[first + 1 : last + 1]
                prompt_rows.append(PromptRows(seq, at, len(logit_rows), following))
        if end < len(seq.tokens):
            continue
        if seq.params.max_tokens:
            sample_rows.append(len(logit_rows))
            logit_rows.append(row + end - begin - 1)
            sampled.append(seq)
        else:
            scored.append(seq)
    batch = Batch(
        torch.tensor(tokens, dtype=torch.int64),
        spans,
        torch.tensor(logit_rows, dtype=torch.int64),
    )
    rows = sample_rows if prompt_rows else None
    return Step(batch, owners, sampled, rows, prompt_rows, scored, routing)
