"""A whole chaos run: servers, the run, faults one after the other, a drain, the audit. Read this first."""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.connect import connect
from broker.errors import BrokerError
from broker.topology import RunLimits
from ops.chaos.auditing import Audited, audit_chaos
from ops.chaos.faults import FaultPlayer
from ops.chaos.plan import Fault, FaultKind, plan
from ops.chaos.rabbit import rabbit_node
from ops.chaos.result import ChaosResult, Recovery
from ops.chaos.servers import BrokerUnderChaos, broker_nodes
from ops.chaos.setup import run_overrides, write_default_config
from ops.chaos.watching import Progress
from ops.chaos.witness import Witness, open_witness
from ops.chaos.world import RunUnderChaos
from ops.config import RunConfig, load_config
from ops.control import ask, standing
from pipeline.wall_clock import OFFSET_FILE_ENV
from schemas.messages.sampling import ControlAction

log = structlog.get_logger("headrace.chaos")

_FIRST_STEP_S: Final = 120.0
_RECOVER_S: Final = 90.0
"""Without a trained step for so long after a fault, the run stands still."""
_DRAIN_S: Final = 180.0
_MOST_DETAILS: Final = 100


class ChaosSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of chaos."""

    num_faults: int
    seed: int
    nodes: int = 1
    """1, or 3 for a cluster with replicated streams."""
    broker: str = "nats"
    """nats | rabbitmq."""
    kinds: frozenset[FaultKind] = frozenset(FaultKind)
    config: str = ""
    """A config file; empty = the built-in one."""
    overrides: Sequence[str] = ()
    folder: str = ""
    """Kept; empty = a temporary one."""


async def run_chaos(settings: ChaosSettings, *, tell: Callable[[str], None] | None = None) -> ChaosResult:
    """Play the faults of a seed on a run and account for everything.

    Raises:
        ConfigError: a config that can't be used.
        TimeoutError: the run never came to its first step, or the broker never answered.
    """
    with _folder(settings.folder) as folder:
        return await _run(settings, folder, tell)


def _open_broker(settings: ChaosSettings, folder: Path) -> AbstractAsyncContextManager[BrokerUnderChaos]:
    if settings.broker == "rabbitmq":
        return rabbit_node(folder, seed=settings.seed)
    return broker_nodes(folder, settings.nodes, seed=settings.seed)


@contextmanager
def _folder(asked: str) -> Generator[Path]:
    """The folder that was asked for, or a temporary one."""
    if asked:
        path = Path(asked).absolute()
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-", ignore_cleanup_errors=True) as name:
        yield Path(name)


async def _run(settings: ChaosSettings, folder: Path, tell: Callable[[str], None] | None) -> ChaosResult:
    began_s = time.monotonic()
    config_file = Path(settings.config) if settings.config else write_default_config(folder)
    clock_file = folder / "clock_offset"
    async with _open_broker(settings, folder) as nodes, open_witness() as witness:
        overrides = (
            *settings.overrides,
            *nodes.overrides(),
            *run_overrides(
                run_dir=folder / "run",
                public_url=witness.url,
            ),
        )
        config = load_config(config_file, overrides)
        limits = RunLimits(
            log_max_bytes=config.broker.max_bytes,
            payload_max_bytes=config.broker.max_payload_store_bytes,
            replicas=settings.nodes,
        )
        world = RunUnderChaos(config_file, overrides, folder / "run", {OFFSET_FILE_ENV: str(clock_file)})
        async with connect(
            nodes.direct_url, config.run.id, nodes.settings("chaos"), create=True, limits=limits
        ) as broker:
            progress = Progress(broker)
            moves = partial(progress.moves, deadline_s=_RECOVER_S)
            player = FaultPlayer(world, nodes, broker, limits, clock_file, moves=moves)
            course = _Course(settings, world, nodes, witness, progress, player)
            try:
                await course.run(broker, tell)
            finally:
                with anyio.CancelScope(shield=True):
                    await world.stop()
            audited = await audit_chaos(config, broker, answered=witness.answered)
    return course.result(audited, config, total_seconds=time.monotonic() - began_s)


class _Course:
    """The faults in their order, and what was seen on the way."""

    def __init__(
        self,
        settings: ChaosSettings,
        world: RunUnderChaos,
        nodes: BrokerUnderChaos,
        witness: Witness,
        progress: Progress,
        player: FaultPlayer,
    ) -> None:
        self._settings: Final = settings
        self._world: Final = world
        self._nodes: Final = nodes
        self._witness: Final = witness
        self._progress: Final = progress
        self._player: Final = player
        self._stuck: Final[list[str]] = []
        self._moving: Final[dict[str, list[float]]] = defaultdict(list)
        self._stepping: Final[dict[str, list[float]]] = defaultdict(list)
        self._played: Final[list[Fault]] = []
        self._seconds = 0.0

    async def run(self, broker: Broker, tell: Callable[[str], None] | None) -> None:
        """Start the run, play all faults, let it go empty, end it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._progress.follow)
            tasks.start_soon(self._point_witness)
            await self._world.start()
            await self._first_step()
            began_s = time.monotonic()
            for fault in plan(self._settings.seed, self._settings.num_faults, kinds=self._kinds()):
                line = await self._play(fault)
                if tell is not None:
                    tell(f"{fault.number + 1}/{self._settings.num_faults} {fault.name} {fault.duration_s:g} s: {line}")
            self._seconds = time.monotonic() - began_s
            await self._drain(broker)
            tasks.cancel_scope.cancel()
        await self._world.interrupt()

    async def _first_step(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._world.watch_first_start)
            if await self._progress.next_step(deadline_s=_FIRST_STEP_S) is None:
                raise TimeoutError(f"no step within {_FIRST_STEP_S:g} s: {' | '.join(self._world.last_lines())}")
            tasks.cancel_scope.cancel()

    def _kinds(self) -> frozenset[FaultKind]:
        return self._settings.kinds & self._nodes.kinds()

    async def _point_witness(self) -> None:
        while not self._witness.gateway_url:
            self._witness.gateway_url = self._world.gateway_url()
            await anyio.sleep(0.02)

    async def _play(self, fault: Fault) -> str:
        """One fault and the recovery from it, in words."""
        try:
            await self._player.play(fault)
        except TimeoutError:
            self._stuck.append(
                f"fault {fault.number} {fault.name}: its target was not there, or its broker did not answer"
            )
        self._played.append(fault)
        healed_unix_s = time.time()
        await self._world.mend()
        if not fault.waits and fault.number + 1 < self._settings.num_faults:
            return "not waited for"
        moving_s = await self._progress.moves(healed_unix_s, deadline_s=_RECOVER_S)
        step_s = None if moving_s is None else await self._progress.next_step(deadline_s=_RECOVER_S)
        if moving_s is None or step_s is None:
            what = "message of any work" if moving_s is None else "trained step"
            self._stuck.append(f"fault {fault.number} {fault.name}: no {what} within {_RECOVER_S:g} s after it")
            await self._world.mend()
            return "stuck"
        self._moving[fault.kind.value].append(moving_s)
        self._stepping[fault.kind.value].append(step_s)
        return f"moving after {moving_s:.2f} s, next step after {step_s:.2f} s"

    async def _drain(self, broker: Broker) -> None:
        """Let the run go empty: nothing new is issued, what is under way ends and is trained."""
        await self._world.mend()
        with anyio.move_on_after(_DRAIN_S):
            while True:
                if not (
                    await standing(broker)
                ).draining:  # a start that was still under way undoes it: a new start goes on
                    await ask(broker, ControlAction.DRAIN, "the faults are over")
                elif await _is_empty(broker):
                    return
                await anyio.sleep(0.3)
        self._stuck.append(f"the run did not go empty within {_DRAIN_S:g} s after the last fault")

    def result(self, audited: Audited, config: RunConfig, *, total_seconds: float) -> ChaosResult:
        """Everything in figures."""
        ledger, found = audited.ledger, audited.ledger.findings
        unexplained = [
            *found.unexplained,
            *self._stuck,
            *(f"left behind: {line}" for line in self._world.orphans),
            *(f"the command ended by itself: {line}" for line in self._world.unasked_ends),
        ]
        doubled = [*found.doubled, *(f"{subject} was created twice" for subject in self._player.doubled)]
        return ChaosResult(
            seed=self._settings.seed,
            num_faults=len(self._played),
            nodes=self._settings.nodes,
            faults=dict(sorted(Counter(fault.kind.value for fault in self._played).items())),
            faults_by_target=dict(sorted(Counter(fault.name for fault in self._played if fault.target).items())),
            disk_full="a small file system under the first node" if self._nodes.small_disk else "not played: no mount",
            unexplained=len(unexplained),
            doubled=len(doubled),
            lost=len(found.lost),
            refold_differs=len(audited.refold_differs),
            seconds=round(self._seconds, 1),
            total_seconds=round(total_seconds, 1),
            steps=len(ledger.manifests),
            groups=ledger.topics["group.issued"],
            slots=ledger.topics["group.issued"] * config.sampling.slots_per_group,
            dropped_groups=ledger.num_dropped,
            repeated_ends=ledger.num_repeated_ends,
            messages=audited.num_messages,
            answered_calls=len(self._witness.answered),
            refused_calls=self._witness.refused,
            dead_letters=ledger.topics["dead.letter"],
            trainer_generations=len({generation for step in ledger.trained.values() for generation in step}),
            run_starts=self._world.num_starts,
            recovery={
                kind: Recovery(moving_s=round(max(moving), 3), step_s=round(max(self._stepping[kind]), 3))
                for kind, moving in sorted(self._moving.items())
            },
            without_node_s=round(max(self._player.without_node_s, default=0.0), 3),
            details=[*unexplained, *doubled, *found.lost, *audited.refold_differs][:_MOST_DETAILS],
        )


async def _is_empty(broker: Broker) -> bool:
    """Whether every issued slot has its result, every group is closed, and every assembled step is trained."""
    counts: Counter[str] = Counter()
    slots = 0
    run = broker.run
    topics = ("group.issued", "group.closed", "trajectory.ready", "step.assembled", "step.trained")
    steps: set[str] = set()
    try:
        async with broker.read([f"hr.{run}.{topic}.>" for topic in topics], follow=False) as records:
            async for record in records:
                tokens = record.subject.split(".")
                topic = ".".join(tokens[2:4])
                counts[topic] += 1
                if topic == "group.issued":
                    slots += int(msgspec.msgpack.decode(record.data)["num_slots"])
                elif topic == "step.trained":
                    steps.add(tokens[4])
    except BrokerError:
        return False
    return (
        counts["trajectory.ready"] == slots
        and counts["group.closed"] == counts["group.issued"]
        and len(steps) == counts["step.assembled"]
    )
