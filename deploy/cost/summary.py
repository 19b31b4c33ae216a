"""What each ledger comes to. Ledgers are never added up with one another, nor currencies."""

from collections.abc import Iterable, Sequence
from decimal import Decimal

import msgspec

from expertmesh.deploy.cost.records import LoadTest, PlatformCharge, Record, Session

MILLION = Decimal(1_000_000)


class Line(msgspec.Struct, frozen=True):
    """Records of one ledger in one currency ("" for those without a price). Costs per million
    tokens divide the WHOLE cost by the tokens of that kind: they are alternatives, not parts.
    None where something is not known."""

    ledger: str
    currency: str
    records: int
    first: str
    last: str
    cost: Decimal | None
    prompt_tokens: int
    generated_tokens: int
    per_million_prompt: Decimal | None
    per_million_generated: Decimal | None
    requests: int
    completed: int
    completion_rate: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None


def summarize(records: Sequence[Record]) -> list[Line]:
    """One line per ledger and currency, in a fixed order."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.LEDGER, record.currency or ""), []).append(record)
    return [
        _line(ledger, currency, _standing(group), _peak(group))
        for (ledger, currency), group in sorted(groups.items())
    ]


def _standing(records: Iterable[Record]) -> list[Record]:
    """Of several records of one session the last: each counts from the session's start."""
    kept: dict[object, Record] = {}
    for record in records:
        kept[record.session if isinstance(record, Session) else object()] = record
    return list(kept.values())


def _peak(records: Iterable[Record]) -> int | None:
    """The most memory that any of them has seen, also those a later one stands for."""
    seen = [one.memory_bytes for one in records if isinstance(one, LoadTest | Session)]
    return max((one for one in seen if one is not None), default=None)


def _line(ledger: str, currency: str, group: Sequence[Record], peak: int | None) -> Line:
    costs = [record.cost for record in group]
    cost = sum((one for one in costs if one is not None), Decimal(0)) if currency else None
    prompt = sum(record.prompt_tokens or 0 for record in group)
    generated = sum(record.generated_tokens or 0 for record in group)
    requests = sum(record.requests or 0 for record in group)
    completed = sum(record.completed or 0 for record in group)
    times = sorted(record.at.isoformat(timespec="seconds") for record in group)
    return Line(
        ledger=ledger,
        currency=currency,
        records=len(group),
        first=times[0],
        last=times[-1],
        cost=cost,
        prompt_tokens=prompt,
        generated_tokens=generated,
        per_million_prompt=_per_million(cost, prompt),
        per_million_generated=_per_million(cost, generated),
        requests=requests,
        completed=completed,
        completion_rate=completed / requests if requests else None,
        tokens_per_second=_speed(group, generated),
        peak_memory_bytes=peak,
    )


def _per_million(cost: Decimal | None, tokens: int) -> Decimal | None:
    if cost is None or tokens == 0:
        return None
    return (cost * MILLION / tokens).quantize(Decimal("0.000001"))


def _speed(group: Sequence[Record], generated: int) -> float | None:
    """Generated tokens per second of work; a bill's hours may have been idle."""
    if any(isinstance(one, PlatformCharge) for one in group):
        return None
    seconds = sum(one.seconds for one in group if isinstance(one, LoadTest | Session))
    return generated / seconds if seconds else None
