"""Ten thousand small steps in a store of 200 MB; three hundred in one that is smaller by as much."""

from __future__ import annotations

import pytest

from broker.connect import connect
from broker.embedded import EmbeddedServer
from pipeline.holds import read_mark

SMALL_STEPS = (
    "sampling.groups_per_step=1",
    "sampling.slots_per_group=2",
    "sampling.max_staleness=4",
    "arena.poll_interval_s=0.05",
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("steps", "log_bytes", "payload_bytes", "age_s"),
    [
        pytest.param(300, 1_800_000, 4_200_000, 1.0, marks=pytest.mark.timeout(600)),
        pytest.param(10_000, 60_000_000, 140_000_000, 10.0, marks=pytest.mark.timeout(4 * 3600)),
    ],
)
async def test_small_steps_in_a_small_store_are_all_accounted_for(
    headrace, tmp_path, steps, log_bytes, payload_bytes, age_s
) -> None:
    settings = [
        *SMALL_STEPS,
        f"broker.max_bytes={log_bytes}",
        f"broker.max_payload_store_bytes={payload_bytes}",
        f"retention.min_payload_age_s={age_s}",
        "retention.checkpoint_period_s=2.0",
    ]
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    async with headrace("--steps", str(steps), *overrides) as run:
        result = await run.result()
    assert result["steps"] == steps
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)
    groups = result["groups"]
    assert groups["trained"] == steps
    assert groups["issued"] == groups["trained"] + groups["dropped"] + groups["open"]
    server = EmbeddedServer(tmp_path / "run" / "nats")
    await server.start()
    try:
        async with connect(server.url, "smoke", server.connect_settings()) as broker:
            mark = await read_mark(broker)
            status = await broker.log_status()
    finally:
        await server.stop()
    assert mark is not None
    assert status.last_sequence > 1.5 * status.num_messages
    assert status.size_bytes < log_bytes
    assert status.payload_bytes < payload_bytes
