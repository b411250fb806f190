"""The gateway's and the launchers' view of the log."""

from __future__ import annotations

import msgspec
import pytest

from broker.connect import connect
from broker.embedded import embedded_server
from ops.rollout_adapters import LogRecorder
from pipeline.delivery import Retry, RetryPolicy, decide
from pipeline.log import RunLog
from stages.gateway.ports import RecorderUnavailableError


async def test_a_log_that_is_away_uses_up_no_attempt_of_what_needs_a_session(tmp_path):
    policy = RetryPolicy()
    async with embedded_server(tmp_path / "nats") as server:
        settings = msgspec.structs.replace(server.connect_settings(), publish_deadline_s=0.5)
        async with connect(server.url, "r", settings, create=True) as broker:
            await server.stop()
            with pytest.raises(RecorderUnavailableError) as raised:
                await LogRecorder(RunLog(broker)).read_session("g0-0-0-1")
    assert isinstance(decide(raised.value, policy.max_attempts, policy), Retry)
