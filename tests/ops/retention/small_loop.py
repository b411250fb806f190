"""A whole run in one process, without agents: real folds, stages, trainer loop and retention; rollouts are made up."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import numpy as np

from broker.api import Broker
from ops.retention.owner import Readers, RetentionOwner
from pipeline.fold import FoldRunner, FoldSettings
from pipeline.headroom import WorkerBroker
from pipeline.lease import HeldLease
from pipeline.log import RunLog, RunPayloads
from pipeline.metrics import Metrics
from pipeline.runner import StageRunner
from pipeline.stage import bind, stage
from schemas import arrays
from schemas.config import RetentionSection
from schemas.messages.rollout import EpisodeClass, Row, RowTokens, Trajectory
from schemas.messages.sampling import EpisodeRequested, RunStarted, StreamListed, StreamRow
from schemas.topics import EPISODE_REQUESTED, RUN_STARTED, TRAJECTORY_READY
from stages.assembly.fold import AssemblyFold
from stages.assembly.settings import AssemblySettings
from stages.fan_out import fan_out
from stages.ports import Payloads
from stages.sampling.fold import SamplingFold
from stages.sampling.settings import SamplingSettings
from stages.training.loop import LoopSettings, TrainerLoop
from stages.training.standin import StandInBackend

GROUPS, SLOTS = 2, 2
READERS = Readers(folds=("sampling", "assembly"), durables=("fan_out", "roll_out"), trains=True)
QUICK = RetentionSection(min_payload_age_s=0.0, period_s=0.02)
CHECKPOINTS = FoldSettings(checkpoint_every=50, checkpoint_period_s=0.2)


def sampling_fold(max_staleness: int = 1) -> SamplingFold:
    return SamplingFold(
        SamplingSettings(
            streams=("s",),
            groups_per_step=GROUPS,
            slots_per_group=SLOTS,
            max_staleness=max_staleness,
            max_concurrent_groups=(max_staleness + 1) * GROUPS + 12,
        )
    )


def assembly_fold(run: str, max_staleness: int = 1) -> AssemblyFold:
    return AssemblyFold(
        AssemblySettings(
            run=run, groups_per_step=GROUPS, slots_per_group=SLOTS, max_staleness=max_staleness, temperature=1.0
        )
    )


@stage(consumes=EPISODE_REQUESTED, produces=(TRAJECTORY_READY,), concurrency=8)
async def roll_out(requested: EpisodeRequested, *, payloads: Payloads, tokens: int) -> list[Trajectory]:
    """A slot's rows, by its ids alone."""
    number = int(requested.group[1:]) * SLOTS + requested.slot
    random = np.random.default_rng(number)
    data = RowTokens(
        token_ids=arrays.int32(random.integers(0, 256, tokens, dtype=np.int32)),
        loss_mask=arrays.bits(np.ones(tokens, dtype=np.bool_)),
        logprobs=arrays.float32(random.random(tokens, dtype=np.float32)),
        versions=arrays.runs(np.full(tokens, requested.min_version, dtype=np.int32)),
        turns=arrays.runs(np.zeros(tokens, dtype=np.int32)),
    )
    row = Row(
        row=f"{requested.group}-{requested.slot}-0",
        tokens=await payloads.put(msgspec.msgpack.encode(data)),
        num_tokens=tokens,
        num_loss_tokens=tokens,
        min_version=requested.min_version,
        max_version=requested.min_version,
        reward=float(number % 3),
    )
    return [
        Trajectory(
            group=requested.group,
            slot=requested.slot,
            attempt=0,
            session="",
            stream=requested.stream,
            data_id=requested.data_id,
            outcome=EpisodeClass.SCORED,
            rejected=False,
            rows=[row],
            score=row.reward,
            reward=row.reward,
        )
    ]


class SmallLoop:
    """Runs until `steps` are trained; `retention` None: nothing is ever purged."""

    def __init__(
        self,
        broker: Broker,
        folder: Path,
        *,
        retention: RetentionSection | None = QUICK,
        tokens: int = 64,
        max_staleness: int = 1,
        bounded: bool = False,
    ) -> None:
        """Args:
        bounded: groups are issued only where the store has room for them.
        """
        self.broker = WorkerBroker(broker)
        self.folder = folder
        self.metrics = {name: Metrics(broker.run, name) for name in ("retention", "sampling", "assembly", "trainer")}
        self._bounded = bounded
        self.sampling = FoldRunner(sampling_fold(max_staleness), self.broker, self.metrics["sampling"], CHECKPOINTS)
        self.assembly = FoldRunner(
            assembly_fold(broker.run, max_staleness), self.broker, self.metrics["assembly"], CHECKPOINTS
        )
        self.most_bytes = [0, 0]
        """The largest log and payload store that were seen."""
        self.log = RunLog(self.broker, publish=self.broker.publish_patiently)
        self.payloads = RunPayloads(self.broker, store=self.broker.bulk_payloads)
        self._tokens = tokens
        readers = msgspec.structs.replace(READERS, groups_per_step=GROUPS if bounded else 0)
        self.owner = (
            None
            if retention is None
            else RetentionOwner(broker, broker.payloads, self.metrics["retention"], readers, retention)  # pyright: ignore[reportArgumentType]
        )

    async def begin(self, steps: int) -> int:
        """Say a start of the run; its ordinal."""
        ordinal = 0
        while await self.log.find(RUN_STARTED, ordinal) is not None:
            ordinal += 1
        await self.log.publish(
            RunStarted(
                ordinal=ordinal,
                config_json=b"{}",
                config_digest="d",
                headrace_version="0",
                steps=steps,
                issue_below=GROUPS if self._bounded else None,
            )
        )
        rows = [StreamRow(data_id=f"d{number}") for number in range(10)]
        ref = await self.payloads.put(msgspec.msgpack.encode(rows))
        await self.log.publish(StreamListed(stream="s", rows=ref, num_rows=len(rows), weight=1.0))
        return ordinal

    async def run(self, steps: int) -> str:
        """Train up to a step; the digest of the weights."""
        start = await self.begin(steps)
        backend = StandInBackend(str(self.folder / "checkpoints"))
        lease = HeldLease(self.broker, "trainer.lease", "t", 60.0)
        await lease.acquire()
        trainer = TrainerLoop(
            self.log,
            self.payloads,
            backend,
            lease,
            self.metrics["trainer"],
            LoopSettings(weights_dir=str(self.folder / "weights"), steps=steps, start=start, checkpoint_every_steps=1),
        )
        rolling = bind(roll_out, payloads=self.payloads, tokens=self._tokens)
        runners = [
            self.sampling,
            self.assembly,
            StageRunner(bind(fan_out), self.broker, Metrics(self.broker.run, "fan_out")),
            StageRunner(rolling, self.broker, Metrics(self.broker.run, "roll_out")),
            *([] if self.owner is None else [self.owner]),
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            async with anyio.create_task_group() as services:
                for runner in runners:
                    services.start_soon(runner.run)
                await trainer.run()
                for runner in runners:
                    runner.drain()
            tasks.cancel_scope.cancel()
        return backend.weights.tobytes().hex()

    async def _watch(self) -> None:
        while True:
            status = await self.broker.log_status()
            for number, size in enumerate((status.size_bytes, status.payload_bytes)):
                self.most_bytes[number] = max(self.most_bytes[number], size)
            self.broker.shares.tell(
                self.metrics["retention"].gauges.get("log_share", 0.0),
                self.metrics["retention"].gauges.get("payload_share", 0.0),
            )
            await anyio.sleep(0.02)
