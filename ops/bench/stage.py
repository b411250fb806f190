"""A stage beside bare nats-py: what decoding, bounds, create-once, redelivery and metrics cost.

`sink` takes messages and acknowledges them; `pass_through` publishes one confirmed message for each. Both run beside the
bare loops of `broker.jetstream.bare_loops` over the same messages, in turn, in one process, on one embedded server.
Where a RabbitMQ is installed, the same stages run on it, too: fewer messages, their `ratio` is against JetStream.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import msgspec
import numpy as np

from broker.api import Broker, ConsumerSettings
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.jetstream.bare_loops import bare_pass_through, bare_sink
from broker.local_rabbit import LocalRabbit, find_server
from broker.naming import run_names
from broker.settings import ConnectSettings
from broker.topology import RunLimits
from ops.bench.result import BenchResult, machine
from pipeline.metrics import Metrics
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.stage import BoundStage, bind, stage
from schemas import arrays
from schemas.messages.rollout import RowTokens
from schemas.subjects import Topic

RUN: Final = "bench"
ROUNDS: Final = 3
RABBITMQ_SHARE: Final = 5
"""One in so many of the messages."""
SIZES: Final = {"1KB": (1024, 20_000), "64KB": (65_536, 1_500)}
_SETTINGS: Final = RunnerSettings(consumer=ConsumerSettings(prefetch=512, max_bytes=32 * 1024 * 1024))


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the wanted size."""

    size: str
    ordinal: int
    body: memoryview


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """What pass-through makes of it."""

    by: str
    size: str
    ordinal: int
    body: memoryview


BLOBS: Final = {size: Topic(f"bench.in{size}", Blob, lambda m: (m.ordinal,), "ordinal") for size in SIZES}
PASSED: Final = Topic("bench.out", Passed, lambda m: (m.by, m.size, m.ordinal), "by.size.ordinal")


def run() -> BenchResult:
    """All figures, messages per second; ratios are medians over rounds that alternate."""
    return anyio.run(_run, backend_options={"use_uvloop": True})


async def _run() -> BenchResult:
    metrics: dict[str, float | str] = {}
    reference: dict[str, float | str] = {}
    ratio: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        server = EmbeddedServer(folder)
        await server.start()
        try:
            limits = RunLimits(log_max_bytes=8 * 2**30)
            async with connect(server.url, RUN, server.connect_settings(), create=True, limits=limits) as broker:
                for size in SIZES:
                    await fill(broker, size)
                    for kind, ours, bare in _contests(broker, server, size):
                        name = f"{kind}_{size}_per_s"
                        metrics[name], reference[name], ratio[name] = await _contest(ours, bare, SIZES[size][1])
        finally:
            await server.stop()
        if find_server() is not None:
            for name, per_s in (await _on_rabbitmq(Path(folder) / "rabbitmq")).items():
                metrics[f"rabbitmq_{name}"] = per_s
                reference[f"rabbitmq_{name}"] = metrics[name]
                ratio[f"rabbitmq_{name}"] = round(per_s / float(metrics[name]), 3)
    metrics.update(_decode_figures())
    return BenchResult(name="stage", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


async def _on_rabbitmq(folder: Path) -> dict[str, float]:
    """Messages per second of the same stages on a RabbitMQ of their own."""
    server = LocalRabbit(folder)
    await server.start()
    figures: dict[str, float] = {}
    try:
        settings = ConnectSettings(payload_dir=str(folder / "shared"))
        for size, (_, count) in SIZES.items():
            less = count // RABBITMQ_SHARE
            async with connect(server.url, f"{RUN}{size}", settings, create=True) as broker:
                await fill(broker, size, less)
                figures[f"sink_{size}_per_s"] = round(less / await time_stage(broker, _sink(size, "sink"), less), 1)
                seconds = await time_stage(broker, pass_through(size, "pass"), less)
                figures[f"pass_through_{size}_per_s"] = round(less / seconds, 1)
    finally:
        server.kill()
    return figures


Timed = Callable[[str], Awaitable[float]]
"""Round's name → seconds."""


def _contests(broker: Broker, server: EmbeddedServer, size: str) -> list[tuple[str, Timed, Timed]]:
    count = SIZES[size][1]
    token = server.token_file.read_text(encoding="utf-8").strip()
    stream = run_names(RUN).log_stream
    pattern = BLOBS[size].filter(RUN)

    async def sink(round_name: str) -> float:
        return await time_stage(broker, _sink(size, f"sink-{round_name}"), count)

    async def bare(round_name: str) -> float:
        return await bare_sink(server.url, token, stream, pattern, f"bare-sink-{size}-{round_name}", count)

    async def through(round_name: str) -> float:
        return await time_stage(broker, pass_through(size, f"pass-{round_name}"), count)

    async def bare_through(round_name: str) -> float:
        return await bare_pass_through(
            server.url,
            token,
            stream,
            pattern,
            f"bare-pass-{size}-{round_name}",
            count,
            lambda subject: f"hr.{RUN}.bench.out.bare-{round_name}.{size}.{subject.rsplit('.', 1)[1]}",
        )

    return [("sink", sink, bare), ("pass_through", through, bare_through)]


async def _contest(ours: Timed, bare: Timed, count: int) -> tuple[float, float, float]:
    ours_s: list[float] = []
    bare_s: list[float] = []
    for number in range(ROUNDS):
        bare_s.append(await bare(f"{number}"))
        ours_s.append(await ours(f"{number}"))
    ratios = [b / o for b, o in zip(bare_s, ours_s, strict=True)]
    return (
        round(count / statistics.median(ours_s), 1),
        round(count / statistics.median(bare_s), 1),
        round(statistics.median(ratios), 3),
    )


async def fill(broker: Broker, size: str, count: int = 0) -> None:
    """Put a size's messages on the log; 0 = as many as there are of it."""
    size_bytes, all_of_them = SIZES[size]
    count = count or all_of_them
    topic, body = BLOBS[size], memoryview(np.random.default_rng(0).bytes(size_bytes))
    limiter = anyio.CapacityLimiter(256)

    async def publish(ordinal: int) -> None:
        async with limiter:
            message = Blob(size=size, ordinal=ordinal, body=body)
            await broker.publish(topic.subject(broker.run, message), topic.encode(message))

    async with anyio.create_task_group() as tasks:
        for ordinal in range(count):
            tasks.start_soon(publish, ordinal)


def _sink(size: str, name: str) -> BoundStage[Blob]:
    @stage(consumes=BLOBS[size], concurrency=64)
    async def sink(blob: Blob) -> list[msgspec.Struct]:  # noqa: ARG001 - a sink
        return []

    return msgspec.structs.replace(bind(sink), name=f"{name}-{size}")


def pass_through(size: str, name: str) -> BoundStage[Blob]:
    """A stage that publishes one message for each, under a name of its own."""

    @stage(consumes=BLOBS[size], produces=(PASSED,), concurrency=256)
    async def pass_on(blob: Blob) -> list[msgspec.Struct]:
        return [Passed(by=name, size=blob.size, ordinal=blob.ordinal, body=blob.body)]

    return msgspec.structs.replace(bind(pass_on), name=f"{name}-{size}")


async def time_stage(broker: Broker, bound: BoundStage[Blob], count: int) -> float:
    """Seconds in which a stage takes `count` messages."""
    metrics = Metrics(broker.run, bound.name)
    runner = StageRunner(bound, broker, metrics, _SETTINGS)
    seconds = 0.0
    async with anyio.create_task_group() as tasks:
        started = time.perf_counter()
        tasks.start_soon(runner.run)
        while metrics.succeeded < count:
            await anyio.sleep(0.001)
        seconds = time.perf_counter() - started
        runner.drain()
    return seconds


def _decode_figures() -> dict[str, float | str]:
    """Allocations of decoding one 8k-token trajectory row to arrays: memory blocks and bytes."""
    tokens = 8192
    row = RowTokens(
        token_ids=arrays.int32(np.arange(tokens)),
        loss_mask=arrays.bits(np.arange(tokens) % 2 == 0),
        logprobs=arrays.float32(np.full(tokens, -0.5)),
        versions=arrays.runs(np.repeat([3, 4], tokens // 2)),
        turns=arrays.runs(np.repeat([0, 1], tokens // 2)),
    )
    data = msgspec.msgpack.encode(row)
    decoder = msgspec.msgpack.Decoder(RowTokens)

    def decode() -> tuple[object, ...]:
        found = decoder.decode(data)
        return found, found.token_ids.as_numpy(), found.logprobs.as_numpy()

    decode()
    gc.collect()
    before = sys.getallocatedblocks()
    kept = decode()
    blocks = sys.getallocatedblocks() - before
    tracemalloc.start()
    start_bytes = tracemalloc.get_traced_memory()[0]
    also_kept = decode()
    used = tracemalloc.get_traced_memory()[0] - start_bytes
    tracemalloc.stop()
    started = time.perf_counter()
    for _ in range(1000):
        decode()
    micros = (time.perf_counter() - started) * 1000
    del kept, also_kept
    return {
        "decode_8k_row_blocks": blocks,
        "decode_8k_row_bytes": used,
        "decode_8k_row_wire_bytes": len(data),
        "decode_8k_row_us": round(micros, 2),
    }
