"""What is told of a request that several replicas have served, one after the other."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from expertmesh.actors.attention.messages import (
    GenerateRequest,
    KvReport,
    SamplingParams,
    TokenOutput,
)
from expertmesh.deploy.tracked import TrackedRequest


def report(pages: int, bound: float, kind: str = "certificate") -> KvReport:
    return KvReport(
        mode="select", bits=8.0, read_pages=pages, estimated_pages=10 * pages, bound=bound,
        bound_kind=kind,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "heir", "whole"),
    [
        (report(2, 0.5), report(3, 0.1), report(5, 0.5)),
        (report(2, 0.1), report(3, 0.5, "estimate"), report(5, 0.5, "estimate")),
        (report(2, 0.1, "estimate"), report(3, 0.0), report(5, 0.1, "estimate")),
    ],
)
def test_old_tokens_were_read_as_all_its_replicas_say(
    lost: KvReport, heir: KvReport, whole: KvReport
) -> None:
    told: list[TokenOutput] = []
    mailbox = cast(Any, SimpleNamespace(put=told.append))
    request = GenerateRequest("r", [1, 2, 3], SamplingParams(max_tokens=9), kv_mode="select")
    tracked = TrackedRequest(request, mailbox)
    tracked.next_attempt()
    for so_far in (report(1, 0.05), lost):
        tracked.receive(TokenOutput(request_id="r", token_ids=[7], kv=so_far))
    tracked.next_attempt()
    tracked.next_attempt()  # that one was lost before it said anything
    for so_far in (report(0, 0.0), heir):
        tracked.receive(TokenOutput(request_id="r~2", token_ids=[8], kv=so_far))
    assert [output.kv for output in told][1::2] == [lost, whole]
    assert told[0].kv == report(1, 0.05) and all(output.request_id == "r" for output in told)
    tracked.receive(TokenOutput(request_id="r~2", finish_reason="length"))
    assert told[-1].kv is None
