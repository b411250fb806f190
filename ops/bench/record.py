"""`headrace bench record`: recording, inspecting and replaying a large log, beside a bare pull loop and a bare publish loop
of the same messages on the same server in the same run.

    publish loop ──▶ log ──pull loop──▶ nothing
                      └───recorder───▶ file ──inspect──▶ one episode
                                        └────replay────▶ a fresh log
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import msgspec
import psutil

from broker.api import Broker
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.recording import Recording
from broker.topology import RunLimits
from ops.bench.result import BenchResult, machine
from ops.logtools.inspecting import conversations
from ops.logtools.names import Kind, Subject
from ops.logtools.record import record_run
from ops.logtools.replay import Replay, ReplaySettings
from schemas import arrays
from schemas.ids import group_id, session_id
from schemas.messages.rollout import FinishReason, InteractionRecorded, InteractionTokens
from schemas.payload import INLINE, PayloadRef, content_id
from schemas.topics import INTERACTION_RECORDED

_RUN: Final = "bench"
_IN_FLIGHT: Final = 512
_CALLS: Final = 5
_SLOTS: Final = 8
_GROUPS_OPEN: Final = 64
_EPISODES_INSPECTED: Final = 20
_BLOBS: Final = 256
_ROUND: Final = 125_000
_LOG_BYTES: Final = 16 * 2**30


def run(num_messages: int = 1_000_000) -> BenchResult:
    """Measure; ratios are ours over the bare loop's."""
    return anyio.run(_run, num_messages, backend_options={"use_uvloop": True})


async def _run(num_messages: int) -> BenchResult:
    """In rounds, each with all four loops over the same messages: whatever else the machine does then slows all alike."""
    rounds = max(1, num_messages // _ROUND)
    each = num_messages // rounds
    messages = _messages(rounds * each)
    seconds = dict.fromkeys(("publish", "pull", "record", "replay"), 0.0)
    memory = _Memory()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        file = Path(folder) / "bench.hrrec"
        async with _log(Path(folder) / "first") as source, _log(Path(folder) / "second") as target:
            for number in range(rounds):
                done = number * each
                seconds["publish"] += await _publish(source, itertools.islice(messages, each))
                seconds["pull"] += await _pull(source, done, each)
                seconds["record"] += await _record(source, file)
                seconds["replay"] += await _replay(file, target, done)
                memory.sample()
        inspect_ms = sorted(_inspect(file, group) for group in _some_groups(rounds * each))
        file_mib = file.stat().st_size / 2**20
    per_s = {name: round(rounds * each / spent) for name, spent in seconds.items()}
    return BenchResult(
        name="record",
        metrics={
            "messages": rounds * each,
            "record_per_s": per_s["record"],
            "replay_per_s": per_s["replay"],
            "inspect_episode_ms_median": round(inspect_ms[len(inspect_ms) // 2], 2),
            "inspect_episode_ms_max": round(inspect_ms[-1], 2),
            "file_mib": round(file_mib, 1),
            "memory_growth_mib": memory.growth_mib,
        },
        reference={"record_per_s": per_s["pull"], "replay_per_s": per_s["publish"]},
        ratio={
            "record_per_s": round(seconds["pull"] / seconds["record"], 3),
            "replay_per_s": round(seconds["publish"] / seconds["replay"], 3),
        },
        machine=machine(),
    )


@asynccontextmanager
async def _log(folder: Path) -> AsyncGenerator[Broker]:
    server = EmbeddedServer(folder)
    await server.start()
    try:
        limits = RunLimits(log_max_bytes=_LOG_BYTES)
        async with connect(server.url, _RUN, server.connect_settings(), create=True, limits=limits) as broker:
            yield broker
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop()


def _messages(num_messages: int) -> Iterator[tuple[str, bytes]]:
    """Calls of many episodes, interleaved as in a run: 64 groups at a time, 8 slots each, 5 calls a slot."""
    chooser = random.Random(0)  # noqa: S311 - made-up tokens
    blobs = [_tokens(chooser) for _ in range(_BLOBS)]
    refs = [
        PayloadRef(store=INLINE, id=content_id(blob), size_bytes=len(blob), inline=memoryview(blob)) for blob in blobs
    ]
    for number in range(num_messages):
        wave, inside = divmod(number, _GROUPS_OPEN * _SLOTS * _CALLS)
        ordinal, episode = divmod(inside, _GROUPS_OPEN * _SLOTS)
        group, slot = divmod(episode, _SLOTS)
        session = session_id(group_id(wave * _GROUPS_OPEN + group), slot, 0, 0)
        call = InteractionRecorded(
            session=session,
            ordinal=ordinal,
            interaction_id=f"chatcmpl-{number}",
            parent=ordinal - 1 if ordinal else None,
            tokens=refs[number % _BLOBS],
            num_context=0,
            num_prompt=40,
            num_completion=40,
            min_version=1,
            max_version=1,
            finish_reason=FinishReason.STOP,
        )
        yield INTERACTION_RECORDED.subject(_RUN, call), INTERACTION_RECORDED.encode(call)


def _tokens(chooser: random.Random) -> bytes:
    """An inline payload that makes a message about 1 KB."""
    return msgspec.msgpack.encode(
        InteractionTokens(
            prompt_ids=arrays.int32([chooser.randrange(32_000) for _ in range(40)]),
            completion_ids=arrays.int32([chooser.randrange(32_000) for _ in range(40)]),
            logprobs=arrays.float32([-chooser.random() for _ in range(40)]),
            versions=arrays.runs([1] * 40),
            messages_json=b'[{"role":"user","content":"%s"}]' % chooser.randbytes(48).hex().encode(),
        )
    )


async def _publish(broker: Broker, messages: Iterator[tuple[str, bytes]]) -> float:
    """A pipelined publish loop: seconds."""

    async def publish_all() -> None:
        for subject, data in messages:
            await broker.publish(subject, data)

    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(_IN_FLIGHT):
            tasks.start_soon(publish_all)
    return time.perf_counter() - started


async def _pull(broker: Broker, after_sequence: int, num_messages: int) -> float:
    """An unacknowledged pull loop that does nothing with what it gets: seconds."""
    count = 0
    started = time.perf_counter()
    async with broker.read([f"hr.{_RUN}.>"], after_sequence=after_sequence, follow=False) as records:
        async for _ in records:
            count += 1
    if count != num_messages:
        raise AssertionError(f"expected {num_messages} messages, pulled {count}")
    return time.perf_counter() - started


async def _record(broker: Broker, file: Path) -> float:
    """Record what is new: seconds."""
    started = time.perf_counter()
    await record_run(broker, file, follow=False)
    return time.perf_counter() - started


async def _replay(file: Path, broker: Broker, after_sequence: int) -> float:
    """Replay what is new: seconds."""
    started = time.perf_counter()
    with Recording(file) as recording:
        settings = ReplaySettings(after_sequence=after_sequence, in_flight=_IN_FLIGHT)
        await Replay(recording, broker, settings).run()
    return time.perf_counter() - started


def _some_groups(num_messages: int) -> list[int]:
    num_groups = max(1, num_messages // (_SLOTS * _CALLS))
    return random.Random(1).choices(range(num_groups), k=_EPISODES_INSPECTED)  # noqa: S311 - which ones does not matter


def _inspect(file: Path, group: int) -> float:
    """Open the recording, find one episode by the index, read its calls: milliseconds."""
    started = time.perf_counter()
    with Recording(file) as recording:
        conversations(recording, Subject(kind=Kind.EPISODE, group=group_id(group), slot=3))
    return (time.perf_counter() - started) * 1000


class _Memory:
    """Resident memory after each round."""

    def __init__(self) -> None:
        self._process: Final = psutil.Process()
        self._samples: Final[list[int]] = []

    def sample(self) -> None:
        """Look now."""
        self._samples.append(self._process.memory_info().rss)

    @property
    def growth_mib(self) -> float:
        """From the second round to the last: 0 for work whose memory is flat."""
        return round((self._samples[-1] - self._samples[min(1, len(self._samples) - 1)]) / 2**20, 1)
