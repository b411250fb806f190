"""What `headrace tap` costs a pipeline: a pass-through stage at its full rate, with and without a tap beside it, in turn.

log ──pass_through──▶ log        rounds: alone, tapped, alone, tapped, …
                       └─▶ headrace tap '>' (a process of its own, at its default rate)
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from broker.api import Broker
from broker.connect import connect
from broker.embedded import embedded_server
from broker.topology import RunLimits
from ops.bench.result import BenchResult, machine
from ops.bench.stage import RUN, fill, pass_through, time_stage
from ops.run_folder import Endpoints, RunFolder

_SIZE: Final = "1KB"
_ROUNDS: Final = 5
_COUNT: Final = 20_000
_LINE_DEADLINE_S: Final = 30.0


def run(rounds: int = _ROUNDS) -> BenchResult:
    """Messages a second through the stage; the ratio is tapped over alone, the median of the rounds."""
    return anyio.run(_run, rounds, backend_options={"use_uvloop": True})


async def _run(rounds: int) -> BenchResult:
    alone_s: list[float] = []
    tapped_s: list[float] = []
    num_shown = 0
    changed = 0
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = RunFolder(Path(name))
        async with embedded_server(folder.nats) as server:
            settings = server.connect_settings()
            limits = RunLimits(log_max_bytes=8 * 2**30)
            folder.write_endpoints(Endpoints(run=RUN, broker_url=server.url, broker_login=settings))
            async with connect(server.url, RUN, settings, create=True, limits=limits) as broker:
                await fill(broker, _SIZE)
                for number in range(rounds):
                    alone_s.append(await time_stage(broker, pass_through(_SIZE, f"alone-{number}"), _COUNT))
                    before = await _durables(broker)
                    async with _tap(folder, broker, number) as tap:
                        tapped_s.append(await time_stage(broker, pass_through(_SIZE, f"tapped-{number}"), _COUNT))
                    num_shown += tap.num_lines
                    after = await _durables(broker)
                    changed += sum(after.get(durable) != status for durable, status in before.items())
                redelivered = sum(status.num_redelivered for status in await broker.consumers())
    ratios = [alone / tapped for alone, tapped in zip(alone_s, tapped_s, strict=True)]
    return BenchResult(
        name="tap",
        metrics={
            "pass_through_tapped_per_s": round(_COUNT / statistics.median(tapped_s)),
            "messages_shown": num_shown,
            "messages_redelivered": redelivered,
            "consumers_changed": changed,
        },
        reference={"pass_through_tapped_per_s": round(_COUNT / statistics.median(alone_s))},
        ratio={"pass_through_tapped_per_s": round(statistics.median(ratios), 3)},
        machine=machine(),
    )


async def _durables(broker: Broker) -> dict[str, tuple[list[str], int, int, int]]:
    """What a tap must not change."""
    return {
        status.durable: (status.filters, status.delivered, status.ack_floor, status.num_redelivered)
        for status in await broker.consumers()
    }


class _Tap:
    """A running `headrace tap` and how much it showed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.num_lines = 0
        self.seen: Final = anyio.Event()
        self._process: Final = process

    async def follow(self) -> None:
        """Count its lines until it ends."""
        output = self._process.stdout
        while output is not None and await anyio.to_thread.run_sync(output.readline):
            self.num_lines += 1
            self.seen.set()


@asynccontextmanager
async def _tap(folder: RunFolder, broker: Broker, number: int) -> AsyncGenerator[_Tap]:
    """A tap of everything, from when it is seen to work."""
    command = [sys.executable, "-m", "ops", "tap", ">", "--run", str(folder.path), "--json"]
    process = await anyio.to_thread.run_sync(lambda: subprocess.Popen(command, stdout=subprocess.PIPE))  # noqa: S603 - this program itself
    tap = _Tap(process)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tap.follow)
            with anyio.fail_after(_LINE_DEADLINE_S):
                marker = 0
                while not tap.seen.is_set():
                    await broker.publish(f"hr.{RUN}.bench.marker.{number}.{marker}", b"\x80")
                    marker += 1
                    await anyio.sleep(0.2)
            yield tap
            process.terminate()
    finally:
        process.kill()
        process.wait()
