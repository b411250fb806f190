"""Damaged, foreign and random messages over all subjects, in memory and on a server: no worker dies of one, each is handled or
becomes a dead letter with a reason.

Nobody speaks in the name of a fold that is at work: what stands where it is about to say something stops it, on purpose
(tests/pipeline/test_fold.py), and rights keep others from saying it. So each fold is at work alone, and hears all that the other one says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import structlog
from waiting import wait_until

from broker.api import Broker, ConsumerSettings
from broker.connect import connect
from broker.embedded import embedded_server
from ops.config import assembly_settings, decode_config, sampling_settings
from ops.logtools.stage_diffs import reward_settings
from pipeline.delivery import RetryPolicy
from pipeline.fold import Fold, FoldRunner, FoldSettings
from pipeline.log import RunLog, RunPayloads
from pipeline.metrics import Metrics
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.sessions import SessionReader
from pipeline.stage import bind, stage
from schemas.errors import SchemaError
from schemas.messages.sampling import DeadLetter, StreamListed, StreamRow, Tick
from schemas.payload import inline_ref
from schemas.topics import EPISODE_REQUESTED, FOLD_TICK, TOPICS
from stages.assembly.fold import AssemblyFold
from stages.fan_out import fan_out
from stages.rewards.map_rewards import map_rewards
from stages.sampling.fold import SamplingFold
from stages.weights.broadcast import broadcast_weights

BATCH = 2000
REASONS = {"undecodable", "refused", "attempts", "deliveries"}
RUN = "damaged"
GOLDEN = json.loads((Path(__file__).parents[1] / "schemas" / "golden_messages.json").read_text())
CONFIG = decode_config(
    {
        "run": {"id": RUN},
        "streams": [{"name": "s", "stream_id": "s"}],
        "sampling": {"groups_per_step": 2, "slots_per_group": 2},
        "training": {"backend": "standin"},
    }
)


REWARDS = reward_settings(CONFIG)


@stage(consumes=EPISODE_REQUESTED, produces=())
async def launch(_requested) -> list:
    """Stands for what launches: takes any request that can be decoded."""
    return []


class Damager:
    """Golden messages of every topic with damage of every kind, from a seed."""

    def __init__(self, seed: int, unsaid: frozenset[str]) -> None:
        """Args:
        unsaid: topics of which no message is put at the place that its content says.
        """
        self._chance = random.Random(seed)
        self._unsaid = unsaid
        self._golden = {name: [bytes.fromhex(one) for one in messages] for name, messages in GOLDEN.items()}
        self._topics = {topic.name: topic for topic in TOPICS}
        self._names = sorted(self._golden)
        self._number = 0

    def next(self) -> tuple[str, bytes]:
        """A subject that was not used before, and what stands there."""
        chance = self._chance
        self._number += 1
        topic = self._topics[chance.choice(self._names)]
        data = self._damaged(topic.name)
        if (
            chance.random() < 0.5 and topic.name not in self._unsaid
        ):  # at the place that its own content says, so that more than the decoder sees it
            with contextlib.suppress(SchemaError):
                return topic.subject(RUN, topic.decode(data)), data
        tokens = [chance.choice(("g0000001", "0", "1", "s", "x")) for _ in range(chance.randrange(0, 4))]
        return ".".join(["hr", RUN, topic.name, *tokens, f"n{self._number}"]), data

    def _damaged(self, name: str) -> bytes:
        chance = self._chance
        data = bytearray(chance.choice(self._golden[name]))
        match chance.randrange(8):
            case 0:
                return chance.randbytes(chance.randrange(0, 200))
            case 1:
                return bytes(data[: chance.randrange(len(data) + 1)])
            case 2:  # another topic's message
                return chance.choice(self._golden[chance.choice(self._names)])
            case 3:  # deeper than any decoder goes
                return b"\x91" * chance.randrange(1, 3000)
            case 4:
                at = chance.randrange(len(data) + 1)
                data[at:at] = chance.randbytes(chance.randrange(1, 20))
            case 5:  # numbers that are too large, not finite or of another kind
                at = chance.randrange(len(data))
                data[at : at + 1] = chance.choice(
                    (
                        b"\xcf" + b"\xff" * 8,
                        b"\xd3\x80" + b"\0" * 7,
                        b"\xcb\x7f\xf8" + b"\0" * 6,
                        b"\xc0",
                        b"\xc3",
                        b"\xc4\x00",
                    )
                )
            case _:
                for _ in range(chance.randrange(1, 4)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)


ONCE = RetryPolicy(max_attempts=1, max_deliveries=1)
"""What a session or a folder that is not there would be waited for is given up at once."""


class Workers:
    """Every kind of reader that a run has: folds, stateless stages, plain readers."""

    def __init__(self, broker: Broker, weights_dir: Path, fold: Fold[Any]) -> None:
        log, payloads = RunLog(broker), RunPayloads(broker)
        never = FoldSettings(checkpoint_every=10**9, checkpoint_period_s=3600.0, payload_deadline_s=0.0)
        settings = RunnerSettings(consumer=ConsumerSettings(ack_wait_s=60.0))
        bound = (
            bind(fan_out),
            bind(launch),
            bind(map_rewards, sessions=SessionReader(log, deadline_s=0.0), payloads=payloads, settings=REWARDS),
            bind(broadcast_weights, payloads=payloads, shelf=None, weights_dir=str(weights_dir)),
        )
        self.broker = broker
        self.read = 0
        self.folds = [FoldRunner(fold, broker, Metrics(RUN, fold.name), never)]
        self.stages = [
            StageRunner(msgspec.structs.replace(one, policy=ONCE), broker, Metrics(RUN, one.name), settings)
            for one in bound
        ]
        self.consumes: dict[str, set[str]] = {
            **{fold.fold.name: {topic.name for topic in fold.fold.consumes} for fold in self.folds},
            **{one.stage.name: {one.stage.consumes.name} for one in self.stages},
        }

    async def plain_reader(self) -> None:
        async with RunLog(self.broker).read(TOPICS) as entries:
            async for _ in entries:
                self.read += 1

    async def handle_all(self, marker: int) -> None:
        """Return when everyone has handled all that was published before."""
        tick = Tick(ordinal=10**9 + marker, period_s=1.0, unix_time_s=0.0)
        await RunLog(self.broker).publish(tick)
        record = await self.broker.get(FOLD_TICK.subject(RUN, tick))
        assert record is not None

        async def all_handled() -> bool:
            if any(fold.sequence < record.sequence for fold in self.folds):
                return False  # it may still give work to the stages
            return not any(status.num_pending or status.num_ack_pending for status in await self.broker.consumers())

        await wait_until(all_handled, "everyone has handled what was published", deadline_s=300)


@contextlib.asynccontextmanager
async def working(broker: Broker, weights_dir: Path, fold: Fold[Any]) -> AsyncGenerator[Workers]:
    """All workers at work; one that dies ends the test with its error."""
    rows = inline_ref(msgspec.msgpack.encode([StreamRow(data_id=str(number)) for number in range(8)]))
    await RunLog(broker).publish(StreamListed(stream="s", rows=rows, num_rows=8, weight=1.0))
    workers = Workers(broker, weights_dir, fold)
    async with anyio.create_task_group() as tasks:
        for worker in (*workers.folds, *workers.stages):
            tasks.start_soon(worker.run)
        tasks.start_soon(workers.plain_reader)
        yield workers
        tasks.cancel_scope.cancel()


async def _let_in(broker: Broker, workers: Workers, damager: Damager, num_messages: int) -> None:
    for start in range(0, num_messages, BATCH):
        async with anyio.create_task_group() as tasks:
            for _ in range(min(BATCH, num_messages - start)):
                tasks.start_soon(broker.publish, *damager.next())
        await workers.handle_all(start)


async def _check(broker: Broker, workers: Workers) -> Counter[str]:
    """Why messages became dead letters; every message that is none of its topic is one, for each who takes the topic."""
    reasons: Counter[str] = Counter()
    letters: set[tuple[str, int]] = set()
    undecodable: set[tuple[str, int]] = set()
    by_name = {topic.name: topic for topic in TOPICS}
    async with broker.read([f"hr.{RUN}.>"], follow=False) as records:
        async for record in records:
            name = ".".join(record.subject.split(".")[2:4])
            try:
                message = by_name[name].decode_at(RUN, record.subject, record.data)
            except SchemaError:
                undecodable |= {(who, record.sequence) for who, topics in workers.consumes.items() if name in topics}
                continue
            if isinstance(message, DeadLetter) and message.stage in workers.consumes and message.reason in REASONS:
                reasons[message.reason] += 1
                letters.add((message.stage, message.sequence))
    assert undecodable <= letters
    assert undecodable
    return reasons


def folds() -> list[Fold[Any]]:
    return [SamplingFold(sampling_settings(CONFIG)), AssemblyFold(assembly_settings(CONFIG))]


async def _play(broker: Broker, weights_dir: Path, fold: Fold[Any], num_messages: int, *, seed: int) -> Counter[str]:
    damager = Damager(seed, frozenset(topic.name for topic in fold.produces))
    async with working(broker, weights_dir, fold) as workers:
        await _let_in(broker, workers, damager, num_messages)
        return await _check(broker, workers)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Each dead letter is told; here there are very many."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.mark.parametrize("fold", folds(), ids=lambda fold: fold.name)
async def test_10_000_damaged_messages_in_memory_stop_nobody(tmp_path: Path, fold: Fold[Any]) -> None:
    async with connect("memory://", RUN) as broker:
        reasons = await _play(broker, tmp_path, fold, 10_000, seed=1)
    assert reasons["undecodable"] > 500


@pytest.mark.nightly
@pytest.mark.timeout(7200)
async def test_1_000_000_damaged_messages_in_memory_stop_nobody(tmp_path: Path) -> None:
    reasons: Counter[str] = Counter()
    for seed in range(10):
        for fold in folds():
            async with connect("memory://", RUN) as broker:
                reasons += await _play(broker, tmp_path, fold, 50_000, seed=100 + seed)
    assert reasons["undecodable"] > 50_000
    assert reasons["refused"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fold", folds(), ids=lambda fold: fold.name)
async def test_10_000_damaged_messages_on_a_server_stop_nobody(tmp_path: Path, fold: Fold[Any]) -> None:
    async with (
        embedded_server(tmp_path / "nats") as server,
        connect(server.url, RUN, server.connect_settings(), create=True) as broker,
    ):
        reasons = await _play(broker, tmp_path, fold, 10_000, seed=2)
    assert reasons["undecodable"] > 500
