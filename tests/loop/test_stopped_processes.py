"""Each kind of process is stopped in turn, as SIGSTOP does: it is named, nothing grows beyond its bound, and the run goes on."""

from __future__ import annotations

import anyio
import psutil
import pytest
from waiting import wait_until

from ops.status import run_status
from ops.wiring import STAGES
from pipeline.watchdog import Stuck

NAMED = {
    "gateway": {"gateway"},
    "stages": {"sampling", "fan_out", "arena_launch", "rewards", "assembly", "weights", "retention"},
    "trainer": {"trainer"},
    "arena": {"arena_launch"},
}
GROWTH_BYTES = 48 * 2**20
"""Of any process while another one is stopped: what is prefetched and in work is bounded, and so is this."""
MOST_GROUPS = 8
"""(max_staleness + 1) · groups_per_step of the smoke config."""


async def stuck_stages(run) -> list[Stuck]:
    async with run.broker() as broker:
        return (await run_status(broker, STAGES, listen_s=1.5)).stuck


async def groups_under_way(run) -> float:
    async with run.broker() as broker:
        status = await run_status(broker, STAGES, listen_s=1.5)
    gauges = next(report.gauges for stage in status.stages if stage.stage == "sampling" for report in stage.workers)
    return gauges["groups_running"] + gauges["groups_waiting"]


def memory(run) -> dict[str, int]:
    found = {name: child.memory_info().rss for name, child in run.children().items()}
    return {**found, "run": psutil.Process(run.process.pid).memory_info().rss}


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_each_process_that_is_stopped_is_named_within_30_seconds_and_makes_no_other_grow(headrace) -> None:
    settings = ("--set", "watchdog.stuck_after_s=6.0", "--set", "watchdog.silent_after_s=3.0")
    async with headrace("--steps", "100000", *settings) as run:
        step = 3
        await run.wait_for_step(step)
        for kind, named in NAMED.items():
            before, victim = memory(run), run.children()[kind]
            victim.suspend()

            async def stuck(named=named) -> set[str]:
                return {verdict.stage for verdict in await stuck_stages(run)} & named

            found = await wait_until(stuck, f"{named} to be stuck", every_s=0.1)
            verdict = next(verdict for verdict in await stuck_stages(run) if verdict.stage in found)
            assert verdict.waits_for
            await anyio.sleep(10)  # time for whatever does grow
            if kind != "stages":
                assert await groups_under_way(run) <= MOST_GROUPS
            after = memory(run)
            assert {
                name: after[name] - before[name] for name in before if after[name] - before[name] > GROWTH_BYTES
            } == {}
            victim.resume()
            step = await trained(run) + 3
            await run.wait_for_step(step)

            async def nothing_is_stuck() -> bool:
                return not await stuck_stages(run)

            await wait_until(nothing_is_stuck, every_s=0.1)
        victim = run.children()["nats"]
        victim.suspend()
        await wait_until(lambda: b"stage=broker" in run.stderr or b'"stage": "broker"' in run.stderr, "stage=broker")
        victim.resume()
        await run.wait_for_step(step + 3)
        run.interrupt()
        assert await run.process.wait() == 130


async def trained(run) -> int:
    async with run.broker() as broker:
        status = await run_status(broker, STAGES, listen_s=1.5)
    return int(
        next(
            (report.gauges["step"] for stage in status.stages if stage.stage == "trainer" for report in stage.workers),
            0,
        )
    )
