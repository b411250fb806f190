from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import NotConnectedError, PublishTimeoutError, StoreFullError
from pipeline.delivery import Ack, GiveUp, Retry, RetryPolicy, Stop, backoff_s, decide, decide_before
from pipeline.errors import ContractError, RefusedError, RetryableError
from schemas.errors import DecodeError

POLICY = RetryPolicy()
attempts = st.integers(1, 10_000)
units = st.floats(0, 1, exclude_max=True)


def test_no_error_is_an_ack() -> None:
    assert decide(None, 1, POLICY) == Ack()


@given(attempts)
def test_a_broken_contract_stops_the_worker_whatever_the_attempt(attempt: int) -> None:
    assert decide(ContractError("why"), attempt, POLICY) == Stop(reason="why")


@given(attempts, st.sampled_from([RefusedError("no"), DecodeError("no")]))
def test_what_no_retry_can_help_is_given_up_at_once(attempt: int, error: Exception) -> None:
    assert decide(error, attempt, POLICY) == GiveUp(reason="refused")


@given(attempts, units)
def test_an_unknown_error_is_tried_again_until_the_limit(attempt: int, unit: float) -> None:
    decision = decide(ValueError("x"), attempt, POLICY, unit)
    assert isinstance(decision, Retry) == (attempt < POLICY.max_attempts)


@given(
    attempts,
    units,
    st.sampled_from([RetryableError("x"), PublishTimeoutError("x"), NotConnectedError("x"), StoreFullError("x")]),
)
def test_a_retryable_error_and_a_broker_that_is_away_or_full_are_tried_longer(
    attempt: int, unit: float, error: Exception
) -> None:
    decision = decide(error, attempt, POLICY, unit)
    assert isinstance(decision, Retry) == (attempt < POLICY.max_deliveries)


@pytest.mark.parametrize(("errors", "decision"), [
    ([PublishTimeoutError("x"), RetryableError("y")], Retry),
    ([PublishTimeoutError("x"), ValueError("y")], GiveUp),
    ([RetryableError("x"), ExceptionGroup("inner", [RefusedError("y")])], GiveUp),
    ([ValueError("x"), ContractError("y"), RefusedError("z")], Stop),
])  # fmt: skip
def test_of_several_errors_the_one_that_is_worst_to_try_again_decides(errors: list[Exception], decision: type) -> None:
    assert isinstance(decide(ExceptionGroup("both", errors), POLICY.max_attempts, POLICY), decision)


@given(attempts, units)
def test_the_delay_doubles_up_to_its_cap_and_spreads_by_the_jitter(attempt: int, unit: float) -> None:
    plain = min(POLICY.max_delay_s, POLICY.first_delay_s * 2 ** min(attempt - 1, 30))
    delay = backoff_s(attempt, POLICY, unit)
    assert plain * (1 - POLICY.jitter) <= delay <= plain * (1 + POLICY.jitter)


@pytest.mark.parametrize(("attempt", "gone"), [(1, False), (60, False), (61, True)])
def test_a_message_that_kills_its_workers_is_given_up_before_it_is_handled(attempt: int, gone: bool) -> None:
    assert (decide_before(attempt, POLICY) is not None) is gone
