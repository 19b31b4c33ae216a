"""Mailboxes wake readers as rarely as asked, and never lose or delay an end."""

import asyncio
import math
import time

import pytest

from expertmesh.actors.attention.messages import TokenLogprobs, TokenOutput
from expertmesh.deploy.mailbox import Mailbox, merge


def out(*ids: int, finish: str | None = None, routed: bytes | None = None) -> TokenOutput:
    return TokenOutput(
        request_id="r", token_ids=list(ids), finish_reason=finish, routed_experts=routed,  # type: ignore
        logprobs=[TokenLogprobs(i, -1.0, 1, []) for i in ids], prompt_tokens=3,
    )  # fmt: skip


def test_merge_keeps_order_and_the_last_finish() -> None:
    merged = merge([out(1, routed=b"ab"), out(2, 3), out(4, finish="stop", routed=b"c")])
    assert merged.token_ids == [1, 2, 3, 4] and merged.finish_reason == "stop"
    assert [entry.token_id for entry in merged.logprobs or []] == [1, 2, 3, 4]
    assert merged.routed_experts == b"abc" and merged.prompt_tokens == 3


def test_prompt_logprobs_survive_a_merge() -> None:
    first = out(1)
    first.prompt_logprobs = [None]
    assert merge([first, out(2)]).prompt_logprobs == [None]


def test_whose_fault_an_error_is_survives_a_merge() -> None:
    last = out(finish="error")
    last.error, last.error_field = "broke", "structured_outputs.regex"
    merged = merge([out(1), last])
    assert (merged.error, merged.error_field) == ("broke", "structured_outputs.regex")


def test_first_and_last_are_never_held() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        start = time.monotonic()
        mailbox.put(out(1))
        assert (await mailbox.take(lambda: math.inf)).token_ids == [1]
        taking = asyncio.create_task(mailbox.take(lambda: math.inf))
        await asyncio.sleep(0)
        mailbox.put(out(2))
        await asyncio.sleep(0.05)
        assert not taking.done()
        mailbox.put(out(3, finish="length"))
        assert (await taking).token_ids == [2, 3]
        assert time.monotonic() - start < 1

    asyncio.run(run())


@pytest.mark.parametrize("waiting_first", [True, False])
def test_outputs_wait_for_their_turn(waiting_first: bool) -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.put(out(1))
        await mailbox.take(lambda: 0.1)
        start = time.monotonic()
        if waiting_first:
            taking = asyncio.create_task(mailbox.take(lambda: 0.1))
            await asyncio.sleep(0)
        mailbox.put(out(2))
        mailbox.put(out(3))
        if not waiting_first:
            taking = asyncio.create_task(mailbox.take(lambda: 0.1))
        assert (await taking).token_ids == [2, 3]
        assert 0.05 < time.monotonic() - start < 1

    asyncio.run(run())


def test_failure_comes_after_what_arrived() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.put(out(1))
        mailbox.fail(RuntimeError("the replica died"))
        mailbox.put(out(2))
        assert (await mailbox.take(lambda: 0)).token_ids == [1]
        with pytest.raises(RuntimeError, match="died"):
            await mailbox.take(lambda: 0)

    asyncio.run(run())
