"""One hop of a trajectory beside bare nats-py: store, publish, consume, decode to arrays, acknowledge; two processes.

    producer process ──payload stored──▶ trajectory.ready ──▶ stage runner ──▶ payload fetched ──▶ arrays ──▶ ack

The bare loops put the same arrays as raw numpy buffers into one message each (create-once headers, confirmed, pulled
continuously, read with `np.frombuffer`, acknowledged); they know no schema, no limits and no payload store.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

from broker.api import Broker, ConsumerSettings
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.jetstream.bare_loops import bare_consume, bare_produce
from broker.naming import run_names
from broker.settings import ConnectSettings
from broker.topology import RunLimits
from ops.bench.result import BenchResult, machine
from pipeline.log import RunPayloads
from pipeline.metrics import Metrics
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.stage import bind, stage
from schemas import arrays
from schemas.messages.rollout import EpisodeClass, Row, RowTokens, Trajectory
from schemas.topics import TRAJECTORY_READY
from stages.ports import Payloads
from stages.training.loop import row_arrays

RUN: Final = "bench"
ROUNDS: Final = 9
SIZES: Final = {512: 3000, 8192: 800, 65536: 100}
"""Tokens of a trajectory → how many are sent a round."""
_AT_ONCE: Final = 256
_BYTES_AT_ONCE: Final = 32 * 2**20
_SETTINGS: Final = RunnerSettings(consumer=ConsumerSettings(prefetch=512, max_bytes=32 * 2**20))
_BARE_PREFIX: Final = f"hr.{RUN}.bench.bare"


def run() -> BenchResult:
    """Trajectories per second; ratios are medians over rounds that alternate."""
    return anyio.run(_run, backend_options={"use_uvloop": True})


async def _run() -> BenchResult:
    metrics: dict[str, float | str] = {}
    reference: dict[str, float | str] = {}
    ratio: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        server = EmbeddedServer(folder)
        await server.start()
        try:
            limits = RunLimits(log_max_bytes=16 * 2**30, payload_max_bytes=16 * 2**30)
            async with connect(server.url, RUN, server.connect_settings(), create=True, limits=limits) as broker:
                for tokens, count in SIZES.items():
                    ours: list[float] = []
                    bare: list[float] = []
                    for number in range(ROUNDS):
                        bare.append(count / await _bare_round(server, f"{tokens}-{number}", tokens, count))
                        ours.append(count / await _round(server, broker, number, tokens, count))
                    name = f"hop_{tokens}_tokens_per_s"
                    metrics[name] = round(statistics.median(ours), 1)
                    reference[name] = round(statistics.median(bare), 1)
                    ratio[name] = round(statistics.median(a / b for a, b in zip(ours, bare, strict=True)), 3)
        finally:
            await server.stop()
    return BenchResult(name="hop", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


class _Producer:
    """The other process: started, warmed up, then told to go."""

    def __init__(self, kind: str, server: EmbeddedServer, name: str, tokens: int, count: int) -> None:
        arguments = [kind, server.url, str(server.token_file), name, str(tokens), str(count)]
        self._process = subprocess.Popen(  # noqa: S603 - this module, as another process
            [sys.executable, "-m", "ops.bench.hop", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    async def ready(self) -> None:
        """Wait until it is connected."""
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        await anyio.to_thread.run_sync(self._process.stdout.readline)

    def go(self) -> None:
        """Let it send."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    async def end(self) -> None:
        """Wait for its end."""
        await anyio.to_thread.run_sync(self._process.wait)


async def _round(server: EmbeddedServer, broker: Broker, number: int, tokens: int, count: int) -> float:
    producer = _Producer("headrace", server, f"{tokens}-{number}", tokens, count)
    await producer.ready()
    first: list[float] = []

    @stage(consumes=TRAJECTORY_READY, concurrency=64)
    async def take(trajectory: Trajectory, *, payloads: Payloads) -> list[msgspec.Struct]:
        if not first:
            first.append(time.perf_counter())
        arrays_ = row_arrays(await payloads.get(trajectory.rows[0].tokens))
        if len(arrays_.token_ids) != tokens:
            raise ValueError(f"expected {tokens} tokens, found {len(arrays_.token_ids)}")
        return []

    bound = msgspec.structs.replace(bind(take, payloads=RunPayloads(broker)), name=f"take-{tokens}-{number}")
    metrics = Metrics(RUN, bound.name)
    runner = StageRunner(bound, broker, metrics, _SETTINGS)
    await broker.purge_below(
        (await broker.log_status()).last_sequence + 1
    )  # a new durable would take earlier rounds', too
    seconds = 0.0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        producer.go()
        while metrics.succeeded < count:
            await anyio.sleep(0.001)
        seconds = time.perf_counter() - first[0]
        runner.drain()
    await producer.end()
    return seconds


async def _bare_round(server: EmbeddedServer, name: str, tokens: int, count: int) -> float:
    producer = _Producer("bare", server, name, tokens, count)
    await producer.ready()
    producer.go()
    token = server.token_file.read_text(encoding="utf-8").strip()
    first, last = await bare_consume(
        server.url,
        token,
        run_names(RUN).log_stream,
        f"{_BARE_PREFIX}{name}.>",
        f"bare-{name}",
        count,
        _reader(tokens),
    )
    await producer.end()
    return last - first


def _reader(
    tokens: int,
) -> Callable[[bytes], tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.bool_]]]:
    def read(
        data: bytes,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        ids = np.frombuffer(data, np.int32, tokens)
        logprobs = np.frombuffer(data, np.float32, tokens, 4 * tokens)
        mask = np.unpackbits(np.frombuffer(data, np.uint8, tokens // 8, 8 * tokens)).view(np.bool_)
        return ids, logprobs, mask

    return read


def _row(tokens: int) -> RowTokens:
    random = np.random.default_rng(0)
    return RowTokens(
        token_ids=arrays.int32(random.integers(0, 150_000, tokens, dtype=np.int32)),
        loss_mask=arrays.bits(random.random(tokens) < 0.5),
        logprobs=arrays.float32(random.random(tokens, dtype=np.float32)),
        versions=arrays.runs(np.repeat(np.array([3, 4], dtype=np.int32), tokens // 2)),
        turns=arrays.runs(np.repeat(np.array([0, 1], dtype=np.int32), tokens // 2)),
    )


async def _produce(kind: str, url: str, token_file: str, name: str, tokens: int, count: int) -> None:
    if kind == "bare":
        row = _row(tokens)
        mask = np.packbits(row.loss_mask.as_numpy())
        body = row.token_ids.as_numpy().tobytes() + row.logprobs.as_numpy().tobytes() + mask.tobytes()
        await _wait_for_go()
        with open(token_file, encoding="utf-8") as file:  # noqa: ASYNC230, PTH123 - one line, before anything is timed
            token = file.read().strip()
        await bare_produce(url, token, f"{_BARE_PREFIX}{name}", count, body)
        return
    async with connect(url, RUN, ConnectSettings(token_file=token_file)) as broker:
        await _wait_for_go()
        await _produce_trajectories(broker, name, tokens, count)


async def _wait_for_go() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await anyio.to_thread.run_sync(sys.stdin.readline)


async def _produce_trajectories(broker: Broker, name: str, tokens: int, count: int) -> None:
    payloads = RunPayloads(broker)
    row = _row(tokens)
    template = msgspec.msgpack.encode(row)
    at_once = anyio.CapacityLimiter(max(8, min(_AT_ONCE, _BYTES_AT_ONCE // len(template))))
    place = template.find(row.token_ids.as_numpy().tobytes()[:64])

    async def send(number: int) -> None:
        async with at_once:
            data = bytearray(template)
            data[place : place + 4] = number.to_bytes(4, "little")  # no two are equal: equal ones would be stored once
            data[place + 4 : place + 8] = (hash(name) & 0x7FFFFFFF).to_bytes(4, "little")
            ref = await payloads.hold(bytes(data))
            trajectory = Trajectory(
                group=f"g{name}-{number}",
                slot=0,
                attempt=0,
                session="s",
                stream="bench",
                data_id="d",
                outcome=EpisodeClass.SCORED,
                rejected=False,
                rows=[
                    Row(
                        row=f"{name}-{number}",
                        tokens=ref,
                        num_tokens=tokens,
                        num_loss_tokens=tokens // 2,
                        min_version=3,
                        max_version=4,
                        reward=1.0,
                    )
                ],
                reward=1.0,
            )
            await broker.publish(TRAJECTORY_READY.subject(RUN, trajectory), TRAJECTORY_READY.encode(trajectory))

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(send, number)


if __name__ == "__main__":
    _kind, _url, _token_file, _name, _tokens, _count = sys.argv[1:]
    anyio.run(
        _produce, _kind, _url, _token_file, _name, int(_tokens), int(_count), backend_options={"use_uvloop": True}
    )
