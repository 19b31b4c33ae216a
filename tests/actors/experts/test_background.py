"""Work beside serving: in order, one job at a time, spread out only while requests are served."""

import threading
import time

import pytest

from expertmesh.actors.experts.background import SHORTEST_PAUSE_S, Background


def test_jobs_run_one_after_another_and_their_errors_come_back() -> None:
    line, running, most = Background("jobs"), 0, []

    def job(n: int) -> int:
        nonlocal running
        running += 1
        most.append(running)
        time.sleep(0.002)
        running -= 1
        if n == 3:
            raise ValueError("three")
        return n

    results: list[int] = []

    def ask(n: int) -> None:
        if n == 3:
            with pytest.raises(ValueError, match="three"):
                line.run(lambda: job(n))
        else:
            results.append(line.run(lambda: job(n)))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [0, 1, 2, 4, 5, 6, 7]
    assert set(most) == {1}


def test_jobs_are_spread_out_while_steps_are_served_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept, steps = [100.0], list[float](), [0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    line = Background("jobs", lambda: steps[0])
    monkeypatch.setattr("expertmesh.actors.experts.background.time.monotonic", lambda: now[0])
    monkeypatch.setattr("expertmesh.actors.experts.background.time.sleep", sleep)

    def job(seconds: float, served: int) -> float:
        """Returns the pause before it."""

        def work() -> None:
            now[0] += seconds
            steps[0] += served

        line.run(work)
        return slept[-1]

    assert [job(0.01, served=0) for _ in range(3)] == [0, 0, 0], "an idle mesh waits for nothing"
    assert job(0.01, served=1) == 0
    assert job(0.06, served=0) == pytest.approx(SHORTEST_PAUSE_S), "a step lasts longer than a job"
    assert job(9.0, served=1) == pytest.approx(0.24), "four times the job before"
    assert job(0.01, served=0) == pytest.approx(1.0), "but never long"
    now[0] += 5.0
    assert job(0.01, served=0) == 0
    assert job(0.01, served=0) == 0, "the steps of before are long over"
