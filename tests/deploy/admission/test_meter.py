"""Limits of one key: exact over any minute, and Retry-After is when it is over."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.deploy.admission.meter import FIRST_ANSWER_TOKENS, WINDOW_SECONDS, Meter, Window
from expertmesh.deploy.auth.keys import ApiKey, hash_key
from expertmesh.deploy.openai.errors import ApiError


def key(**limits: Any) -> ApiKey:
    return ApiKey(name="team", hash=hash_key("k"), **limits)


def refused(meter: Meter, of: ApiKey, now: float) -> ApiError | None:
    try:
        meter.check(of, now)
    except ApiError as error:
        assert error.status == 429 and "'team'" in error.message
        return error
    return None


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), min_size=1, max_size=40),
    st.integers(0, 200),
)
def test_a_window_is_the_sum_of_the_last_minute(steps: list[tuple[float, int]], most: int) -> None:
    window, seen, now = Window(), list[tuple[float, int]](), 0.0

    def total(at: float) -> int:
        return sum(amount for when, amount in seen if when > at - WINDOW_SECONDS)

    for pause, amount in steps:
        now += pause
        window.add(now, amount)
        assert window.total == total(now) + amount, "what has left is gone, asked for or not"
        seen.append((now, amount))
        wait = window.seconds_until(now, most)
        assert window.total == total(now)
        assert (wait == 0) == (total(now) <= most)
        if wait:
            assert total(now + wait + 1e-9) <= most < total(now + wait - 1e-6)


def test_an_estimate_can_be_settled_until_it_has_left() -> None:
    window = Window()
    early = window.add(0, 100)
    late = window.add(50, 10)
    window.change(early, 1)
    assert window.total == 11
    assert window.seconds_until(70, 10) == 0
    window.change(early, 1000)  # has left with the minute
    window.change(late, 20)
    assert window.total == 20


def test_requests_a_minute() -> None:
    meter, limited = Meter(), key(requests_per_minute=2)
    for now in (0.0, 30.0):
        assert refused(meter, limited, now) is None
        meter.begin(now, 5, 5)
    error = refused(meter, limited, 45.5)
    assert error is not None and error.code == "requests_per_minute_exceeded"
    assert error.retry_after == 15 and "start 2 requests a minute" in error.message
    assert refused(meter, limited, 60.0) is None, "the first one is a minute old"


def test_requests_in_flight() -> None:
    meter, limited = Meter(), key(requests_in_flight=1)
    charge = meter.begin(0, 5, 5)
    error = refused(meter, limited, 300)
    assert error is not None and error.code == "requests_in_flight_exceeded"
    assert error.retry_after == 1
    meter.end(charge, 301, 1, 5)
    assert refused(meter, limited, 301) is None


def test_tokens_a_minute_count_an_estimate_and_then_the_answer() -> None:
    meter, limited = Meter(), key(tokens_per_minute=100)
    charge = meter.begin(0, 60, 40)  # 40: what its answer was thought to need
    error = refused(meter, limited, 1)
    assert error is not None and error.code == "tokens_per_minute_exceeded"
    assert error.retry_after == 59
    meter.end(charge, 2, 1, 10)
    assert refused(meter, limited, 2) is None, "70 tokens were used in the end"
    meter.end(meter.begin(3, 5000, 1), 4, 1, 0)
    assert refused(meter, limited, 5) is not None, "one large request is served, and then it waits"
    assert refused(meter, limited, 64) is None


def test_what_never_ran_costs_no_tokens() -> None:
    meter, limited = Meter(), key(tokens_per_minute=100)
    meter.end(meter.begin(0, 90, 90), 1, 1, None)
    assert refused(meter, limited, 2) is None
    assert meter.expected([10**6]) == FIRST_ANSWER_TOKENS, "and teaches nothing about answers"


def test_expected_answers_follow_what_this_key_gets() -> None:
    meter = Meter()
    assert meter.expected([8, 10**6]) == 8 + FIRST_ANSWER_TOKENS
    for _ in range(200):
        meter.end(meter.begin(0, 1, 1), 0, 2, 20)
    assert meter.expected([10**6]) == pytest.approx(10, abs=1)


def test_no_limits_no_refusal() -> None:
    meter = Meter()
    for _ in range(100):
        meter.begin(0, 10**6, 10**6)
    assert refused(meter, key(), 0) is None
