"""A run at full rate in a small store, for as many minutes as $HEADRACE_SOAK_MINUTES says (20): memory of every process and the
store stay flat; then the store is filled up by a reader that holds it, and the run is left whole when that reader goes.
"""

from __future__ import annotations

import os
import statistics
import time

import anyio
import psutil
import pytest

from ops.status import RunStatus, run_status
from ops.wiring import STAGES
from pipeline.holds import held, read_mark

MINUTES = float(os.environ.get("HEADRACE_SOAK_MINUTES", "20"))
LOG_BYTES, PAYLOAD_BYTES = 8_000_000, 16_000_000
GROWTH = 0.10
SPARE_BYTES = 16 * 2**20
"""Beside that: bounded memories (ended sessions, recorded calls) that fill up in the beginning."""
SETTINGS = (
    f"broker.max_bytes={LOG_BYTES}",
    f"broker.max_payload_store_bytes={PAYLOAD_BYTES}",
    "retention.min_payload_age_s=5.0",
    "retention.checkpoint_period_s=3.0",
    "sampling.groups_per_step=2",
    "sampling.slots_per_group=2",
    "arena.poll_interval_s=0.05",
)


async def status_of(run) -> RunStatus:
    async with run.broker() as broker:
        return await run_status(broker, STAGES, listen_s=1.5)


def retention_labels(status: RunStatus) -> dict[str, str]:
    reports = [report for stage in status.stages if stage.stage == "retention" for report in stage.workers]
    return reports[0].labels if reports else {}


def memory(run) -> dict[str, int]:
    found = {name: child.memory_info().rss for name, child in run.children().items()}
    return {**found, "run": psutil.Process(run.process.pid).memory_info().rss}


@pytest.mark.nightly
@pytest.mark.timeout(MINUTES * 60 + 600)
async def test_memory_and_store_stay_flat_and_a_full_store_is_left_without_loss(headrace, wait_until) -> None:
    overrides = [argument for setting in SETTINGS for argument in ("--set", setting)]
    async with headrace("--steps", "1000000", *overrides) as run:
        await run.wait_for_step(20)
        samples: list[dict[str, int]] = []
        most_log = most_payloads = 0
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end:
            samples.append(memory(run))
            log = (await status_of(run)).log
            most_log, most_payloads = max(most_log, log.size_bytes), max(most_payloads, log.payload_bytes)
            await anyio.sleep(5)
        third = max(1, len(samples) // 3)
        for name in samples[0]:
            early = statistics.median(sample[name] for sample in samples[:third])
            late = statistics.median(sample.get(name, 0) for sample in samples[-third:])
            print(f"{name}: {early / 1e6:.1f} MB, then {late / 1e6:.1f} MB")  # noqa: T201 - what a soak is run for
            assert late - early < GROWTH * early + SPARE_BYTES, name
        print(f"log at most {most_log / 1e6:.1f} MB, payloads {most_payloads / 1e6:.1f} MB")  # noqa: T201 - same
        assert most_log < 0.85 * LOG_BYTES
        assert most_payloads < 0.85 * PAYLOAD_BYTES

        async with run.broker() as broker:
            mark = await read_mark(broker)
            if MINUTES >= 3:
                assert mark is not None
            async with held(broker, "soak", sequence=0 if mark is None else mark.sequence, what="the soak's reader"):

                async def blocked() -> bool:
                    return "the soak's reader" in retention_labels(await status_of(run)).get("store_error", "")

                await wait_until(blocked, deadline_s=400)
                await wait_until(lambda: quiet(run), deadline_s=120)
            step = int(
                next(
                    report.gauges["step"]
                    for stage in (await status_of(run)).stages
                    if stage.stage == "trainer"
                    for report in stage.workers
                )
            )

            async def free() -> bool:
                return "store_error" not in retention_labels(await status_of(run))

            await wait_until(free, deadline_s=120)
        await run.wait_for_step(step + 20, deadline_s=120)
        run.interrupt()
        assert await run.process.wait() == 130
    assert b'"unexplained":0' in run.stdout
    assert b'"doubled":0' in run.stdout


async def quiet(run) -> bool:
    """Nothing is under way: sampling has stopped."""
    status = await status_of(run)
    gauges = [report.gauges for stage in status.stages if stage.stage == "sampling" for report in stage.workers]
    return bool(gauges) and gauges[0]["groups_running"] == 0 and gauges[0]["groups_waiting"] < 2
