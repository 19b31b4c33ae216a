"""Who asks together gets one answer, and never one that began before the question."""

import asyncio

import pytest

from expertmesh.deploy.observability.shared import Shared


class Work:
    """Each run waits for the gate, and returns how many had begun by then."""

    def __init__(self) -> None:
        self.begun = self.most = self.running = 0
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.begun += 1
        mine, error = self.begun, self.error
        self.running += 1
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= 1
        if error is not None:
            raise error
        return mine


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_all_who_come_together_share_one_run() -> None:
    async def main() -> None:
        work = Work()
        shared = Shared(work)
        asked = [asyncio.create_task(shared()) for _ in range(100)]
        await settle()
        late = [asyncio.create_task(shared()) for _ in range(100)]
        await settle()
        assert work.begun == 1, "one at a time"
        work.gate.set()
        assert set(await asyncio.gather(*asked)) == {1}
        assert set(await asyncio.gather(*late)) == {2}, "the first had begun before they asked"
        assert work.most == 1
        assert await shared() == 3

    asyncio.run(main())


def test_who_gives_up_does_not_end_it_for_the_others() -> None:
    async def main() -> None:
        work = Work()
        shared = Shared(work)
        leaves, stays = asyncio.create_task(shared()), asyncio.create_task(shared())
        await settle()
        leaves.cancel()
        await settle()
        work.gate.set()
        assert await stays == 1

    asyncio.run(main())


def test_a_failure_reaches_those_who_asked_and_nobody_later() -> None:
    async def main() -> None:
        work = Work()
        work.error, shared = ValueError("no answer"), Shared(work)
        first = asyncio.create_task(shared())
        await settle()
        second = asyncio.create_task(shared())
        await settle()
        work.error = None  # of the second run
        work.gate.set()
        with pytest.raises(ValueError, match="no answer"):
            await first
        assert await second == 2

    asyncio.run(main())
