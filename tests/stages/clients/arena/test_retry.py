"""When a request is sent again, and after how long."""

from datetime import UTC, datetime

import pytest

from stages.clients.arena.retry import MAX_RETRY_AFTER_S, pause_s, retryable_status

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def test_pauses_double_up_to_ten_seconds() -> None:
    assert [pause_s(n, None, NOW) for n in range(6)] == [1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize(("text", "seconds"), [
    ("7", 7), ("0", 0), ("Thu, 01 Jan 2026 12:00:30 GMT", 30), ("Thu, 01 Jan 2026 11:00:00 GMT", 0), ("99999", MAX_RETRY_AFTER_S), ("soon", 1), ("", 1), ("-3", 1),
])  # fmt: skip
def test_retry_after_is_seconds_or_a_date(text, seconds) -> None:
    assert pause_s(0, text, NOW) == seconds


def test_429_and_5xx_are_worth_another_try() -> None:
    assert [status for status in (400, 401, 404, 409, 422, 429, 500, 502, 503, 599) if retryable_status(status)] == [
        429,
        500,
        502,
        503,
        599,
    ]
