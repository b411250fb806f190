"""How long a message takes from publish to a handler on an idle run, beside bare nats-py; and what an idle worker weighs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import anyio
import msgspec
import numpy as np
import psutil

from broker.api import Broker, ConsumerSettings
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.jetstream.bare_loops import bare_latencies
from broker.naming import run_names
from ops.bench.result import BenchResult, machine
from ops.bench.stage import BLOBS, Blob
from ops.config import decode_config
from ops.run_folder import Endpoints, RunFolder
from pipeline.metrics import REPORT_PREFIX, Metrics
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.stage import bind, stage

RUN: Final = "bench"
COUNT: Final = 400
_PAUSE_S: Final = 0.01
_BODY_BYTES: Final = 1024
_WARM_UP: Final = 50
_WORKER_DEADLINE_S: Final = 60.0


def run() -> BenchResult:
    """Milliseconds, and MB (10⁶ bytes) of resident memory."""
    return anyio.run(_run, backend_options={"use_uvloop": True})


async def _run() -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        server = EmbeddedServer(Path(folder) / "nats")
        await server.start()
        try:
            settings = server.connect_settings()
            async with (
                connect(server.url, RUN, settings, create=True) as sender,
                connect(server.url, RUN, settings) as taker,
            ):
                ours = await _latencies(sender, taker)
                token = server.token_file.read_text(encoding="utf-8").strip()
                stream, body = run_names(RUN).log_stream, bytes(_BODY_BYTES)
                bare = await bare_latencies(
                    server.url, token, stream, f"hr.{RUN}.bench.bare", COUNT + _WARM_UP, _PAUSE_S, body
                )
                worker = await _idle_worker(Path(folder), server, sender)
        finally:
            await server.stop()
    metrics, reference = _figures(ours), _figures(bare[_WARM_UP:])
    ratio = {key: round(metrics[key] / reference[key], 3) for key in metrics}
    return BenchResult(
        name="latency",
        metrics={**metrics, "idle_worker_mb": worker},
        reference={**reference},
        ratio=ratio,
        machine=machine(),
    )


def _figures(seconds: list[float]) -> dict[str, float]:
    p50, p95, p99 = np.percentile(np.array(seconds) * 1000, [50, 95, 99]).tolist()
    return {"publish_to_handler_p50_ms": round(p50, 3), "publish_to_handler_p95_ms": round(p95, 3), "publish_to_handler_p99_ms": round(p99, 3)}  # fmt: skip


async def _latencies(sender: Broker, taker: Broker) -> list[float]:
    """Seconds from publish to handler of one message at a time, over two connections."""
    topic, found, sent = BLOBS["1KB"], list[float](), [0.0]
    body = memoryview(bytes(_BODY_BYTES))

    @stage(consumes=topic, concurrency=8)
    async def take(blob: Blob) -> list[msgspec.Struct]:  # noqa: ARG001 - only its coming counts
        found.append(time.perf_counter() - sent[0])
        return []

    settings = RunnerSettings(consumer=ConsumerSettings(prefetch=64))
    runner = StageRunner(bind(take), taker, Metrics(RUN, "take"), settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        for number in range(COUNT + _WARM_UP):
            await anyio.sleep(_PAUSE_S)
            message = Blob(size="1KB", ordinal=number, body=body)
            subject, data = topic.subject(RUN, message), topic.encode(message)
            sent[0] = time.perf_counter()
            await sender.publish(subject, data)
        while len(found) < COUNT + _WARM_UP:
            await anyio.sleep(0.001)
        runner.drain()
    return found[_WARM_UP:]


async def _idle_worker(folder: Path, server: EmbeddedServer, broker: Broker) -> float:
    """Resident memory of a `headrace worker fan_out` that has nothing to do, in MB."""
    run_folder = RunFolder(folder / "run")
    run_folder.create()
    tree = {"run": {"id": RUN, "dir": str(run_folder.path)}, "streams": [{"name": "s", "stream_id": "s"}]}
    run_folder.write_config(decode_config(tree))
    run_folder.write_endpoints(Endpoints(run=RUN, broker_url=server.url, broker_login=server.connect_settings()))
    command = [sys.executable, "-m", "ops", "worker", "fan_out", "--run-dir", str(run_folder.path)]
    log_file = (folder / "worker.log").open("wb")
    with log_file:
        process = subprocess.Popen(command, stdout=log_file, stderr=log_file)  # noqa: S603, ASYNC220 - this program itself
        try:
            async with broker.listen(f"{REPORT_PREFIX}.{RUN}.fan_out") as reports:
                with anyio.fail_after(_WORKER_DEADLINE_S):
                    for _ in range(3):
                        await anext(reports)
            return round(psutil.Process(process.pid).memory_info().rss / 1e6, 1)
        finally:
            process.terminate()
            process.wait()
