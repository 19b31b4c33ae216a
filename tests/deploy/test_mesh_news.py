"""What the serve command prints about its mesh."""

from typing import Any

from expertmesh.deploy.mesh_news import news


def status(**changes: Any) -> dict[str, Any]:
    def member(seat: str, serial: int = 0) -> dict[str, Any]:
        return {"seat": seat, "actor": f"m-{seat}.{serial}", "pid": 40 + serial, "host": "box",
                "leaving": False}  # fmt: skip

    plain = {
        "state": "ready", "reason": "", "epoch": 0, "losses": 0, "last_loss": "", "failovers": 0,
        "last_recovery_seconds": 0.0, "failed_joins": 0, "last_error": "",
        "attention": [member("attention-0")], "experts": [member("expert-0"), member("expert-1")],
    }  # fmt: skip
    given = {
        key: [member(*one) if isinstance(one, tuple) else member(one) for one in value]
        if isinstance(value, list) else value for key, value in changes.items()
    }  # fmt: skip
    return plain | given


def lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [line for _, line in news(before, after)]


def test_nothing_happened() -> None:
    assert news(status(), status()) == []
    assert news(status(), status(epoch=4, last_recovery_seconds=3.0)) == []  # a rebalance


def test_a_loss_and_what_becomes_of_it() -> None:
    lost = status(state="recovering", reason="expert-1 has died", losses=1,
                  last_loss="m-expert-1.0 has died", experts=["expert-0"])  # fmt: skip
    assert lines(status(), lost) == [
        "expert-1 is gone (m-expert-1.0, pid 40 on box)", "lost m-expert-1.0 has died",
        "recovering: expert-1 has died",
    ]  # fmt: skip
    up = status(losses=1, failovers=1, last_recovery_seconds=1.26, experts=["expert-0"], epoch=1)
    assert lines(lost, up) == ["running requests went on after 1.3 s", "ready, epoch 1"]
    back = up | status(losses=1, failovers=1, epoch=2, experts=["expert-0", ("expert-1", 3)])
    assert lines(up, back) == ["expert-1 has joined (m-expert-1.3, pid 43 on box)"]


def test_a_loss_between_two_looks() -> None:
    after = status(losses=2, last_loss="x has died", failovers=1, last_recovery_seconds=0.5,
                   experts=["expert-0", ("expert-1", 3)])  # fmt: skip
    assert lines(status(), after) == [
        "expert-1 is replaced by m-expert-1.3, pid 43 on box",
        "lost 2 actors, the last one: x has died",
        "running requests went on after 0.5 s",
    ]  # fmt: skip


def test_not_serving_and_failed_joins() -> None:
    after = status(state="unserviceable", reason="7 experts have no room", failed_joins=1,
                   last_error="expert-1: out of memory")  # fmt: skip
    assert lines(status(), after) == [
        "an actor did not come up: expert-1: out of memory", "not serving: 7 experts have no room"
    ]  # fmt: skip


def test_scaling_down_is_told_in_two_steps() -> None:
    leaving = status()
    leaving["experts"][1]["leaving"] = True
    assert lines(status(), leaving) == ["expert-1 is leaving"]
    assert lines(leaving, status(experts=["expert-0"])) == [
        "expert-1 is gone (m-expert-1.0, pid 40 on box)"
    ]
