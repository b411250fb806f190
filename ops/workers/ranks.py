"""A node's launcher of a trainer over several nodes: starts this node's ranks with those of the others, ends them with those.

The leading node's launcher coordinates: `ops.nodes.ranks` says how. Nothing is fenced here: a former group's rank 0 has lost its
lease, and ranks of different sessions don't find each other.
"""

from __future__ import annotations

import math
import os
import socket
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import psutil
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from ops.config import RunConfig
from ops.engines.server_process import free_port
from ops.nodes.rank_failures import RankFailures
from ops.nodes.ranks import (
    BEAT_S,
    GROUP_ENV,
    Coordinator,
    GroupPhase,
    LeaderWord,
    MemberPhase,
    MemberWord,
    Order,
    RankGroup,
    RanksGivenUpError,
    Silence,
    Word,
    interface_of,
    obey,
    rank_environments,
    words_subject,
)
from ops.run_folder import RunFolder
from ops.supervise.process import ProcessSpec, RestartPolicy, changed_at, python
from ops.workers.checkpoint_place import checkpoint_folder, meet_in
from ops.workers.context import WorkerContext
from ops.workers.rank_processes import RankProcesses, RanksEnd
from pipeline.metrics import Metrics
from schemas.errors import ConfigError
from schemas.payload import digest

log = structlog.get_logger("headrace.ranks")

ERROR_LABEL: Final = "ranks_error"
_LEAST_FAILURES: Final = 8
_STOP_S: Final = 5.0
_PHASES: Final = {
    RanksEnd.FINISHED: MemberPhase.FINISHED,
    RanksEnd.FAILED: MemberPhase.FAILED,
    RanksEnd.STOPPED: MemberPhase.IDLE,
}


async def run_ranks(context: WorkerContext) -> None:
    """Run this node's ranks until the trainer's work is done, or until drained.

    Raises:
        ConfigError: no topology says that this node has ranks.
        RanksGivenUpError: ranks died too often.
    """
    told = os.environ.get(GROUP_ENV)
    if not told:
        raise ConfigError(f"ranks: expected {GROUP_ENV} as `headrace up` sets it on nodes with a part of the trainer")
    config, group = context.config, msgspec.json.decode(told, type=RankGroup)

    async def specs(word: LeaderWord) -> list[ProcessSpec]:
        return await rank_specs(context.folder, group, word)

    launcher = RankLauncher(
        context.broker,
        group,
        context.metrics("ranks"),
        specs,
        checkpoint_folder(config, context.folder),
        silent_beats=math.ceil(config.training.node_silent_s / BEAT_S),
        failures=RankFailures(
            max(_LEAST_FAILURES, config.run.max_restarts), partial(changed_at, _progress(context.folder))
        ),
        settings=training_digest(config),
    )
    context.on_drain(launcher.drain)
    await launcher.run()


class RankLauncher:
    """One node's."""

    def __init__(
        self,
        broker: Broker,
        group: RankGroup,
        metrics: Metrics,
        specs: Callable[[LeaderWord], Awaitable[list[ProcessSpec]]],
        checkpoints: Path,
        *,
        silent_beats: int,
        failures: RankFailures,
        settings: str,
    ) -> None:
        """Args:
        specs: this node's ranks of a session.
        checkpoints: where all ranks write them.
        silent_beats: so many beats without a word, and a node is given up.
        failures: of ranks; after too many the leading node gives up.
        settings: digest of what must be the same on all nodes.
        """
        self._broker: Final = broker
        self._group: Final = group
        self._metrics: Final = metrics
        self._specs: Final = specs
        self._checkpoints: Final = checkpoints
        self._incarnation: Final = uuid.uuid4().hex
        self._silence: Final = Silence(group.node, silent_beats)
        self._coordinator: Final = (
            Coordinator(
                group,
                self._incarnation,
                silent_beats=silent_beats,
                new_session=self._new_session,
                settings=settings,
            )
            if group.leads
            else None
        )
        self._failures: Final = failures
        self._num_failed = 0
        self._settings: Final = settings
        self._meeting: Final[list[anyio.CancelScope]] = []
        self._leader: LeaderWord | None = None
        self._ranks: RankProcesses | None = None
        self._phase, self._session, self._reason, self._for_good = MemberPhase.IDLE, "", "", False
        self._leaving = False
        self._stopping = False
        self._beat = 0
        self._changed = anyio.Event()

    def drain(self) -> None:
        """End after the ranks have."""
        self._leaving = True
        self._wake()

    async def run(self) -> None:
        """Until the trainer's work is done everywhere, or drained.

        Raises:
            RanksGivenUpError: ranks died too often.
        """
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._listen)
            tasks.start_soon(self._speak_now_and_then)
            while True:
                changed = self._changed
                if await self._turn(tasks):
                    break
                await changed.wait()
            await self._speak()
            tasks.cancel_scope.cancel()

    async def _turn(self, tasks: anyio.abc.TaskGroup) -> bool:
        """Do what follows from all that is known now; whether all is done."""
        if self._coordinator is not None:
            before, word = self._coordinator.word, self._coordinator.decide(anyio.current_time())
            self._hear_leader(word)
            if word != before:
                await self._said_anew(self._coordinator, word)
        if self._leaving:
            if self._phase is not MemberPhase.RUNNING:
                self._phase = MemberPhase.LEFT
                return True
            self._stop(tasks)
            return False
        silent = self._silence.is_silent(self._group.leader)
        order = obey(self._leader, self._phase, self._session, silent=silent)
        if order is Order.START and self._leader is not None:
            self._phase, self._session, self._reason = MemberPhase.RUNNING, self._leader.session, ""
            self._for_good = self._stopping = False
            tasks.start_soon(self._run_session, self._leader)
            await self._speak()
        elif order is Order.KILL:
            await self._kill(silent=silent)
        elif order is Order.STOP:
            self._stop(tasks)
        self._tell()
        return order is Order.LEAVE

    async def _kill(self, *, silent: bool) -> None:
        if self._phase is MemberPhase.RUNNING:
            if self._ranks is not None and not self._stopping:
                why = f"node {self._group.leader} is silent" if silent else self._leader.reason if self._leader else ""
                log.warning("the ranks of this node are ended with the others", session=self._session, reason=why)
                self._stopping = True
                self._end_meeting()
                self._ranks.kill()
        else:
            self._phase, self._session = MemberPhase.IDLE, ""
            await self._speak()

    def _stop(self, tasks: anyio.abc.TaskGroup) -> None:
        if self._ranks is not None and not self._stopping:
            self._stopping = True
            self._end_meeting()
            tasks.start_soon(self._ranks.stop)

    def _end_meeting(self) -> None:
        for scope in self._meeting:
            scope.cancel()

    async def _run_session(self, word: LeaderWord) -> None:
        ranks = RankProcesses(await self._specs(word))
        self._ranks = ranks
        log.info("a session begins", session=word.session, ranks=self._group.num_ranks, of=self._group.world_size)
        try:
            self._check_settings(word)
            with anyio.CancelScope() as scope:
                self._meeting.append(scope)
                await meet_in(self._checkpoints, word.session, leads=self._group.leads, leader=self._group.leader)
        except ConfigError as error:
            self._phase, self._reason = MemberPhase.FAILED, str(error)
        else:
            end = await ranks.run()
            self._phase, self._reason, self._for_good = _PHASES[end], ranks.reason, ranks.for_good
        if self._phase is MemberPhase.FAILED:
            log.error("the ranks of this node have failed", session=word.session, reason=self._reason)
        if self._phase is MemberPhase.IDLE:
            self._session = ""
        self._ranks = None
        self._meeting.clear()
        await self._speak()
        self._wake()

    def _check_settings(self, word: LeaderWord) -> None:
        if word.settings != self._settings:
            raise ConfigError(
                f"other [training], [loss], [assembly] or [run] settings than node {self._group.leader} has: copy its config here"
            )

    async def _said_anew(self, coordinator: Coordinator, word: LeaderWord) -> None:
        if word.phase is GroupPhase.GATHERING:
            log.warning("the trainer's group has ended and gathers again", reason=word.reason)
        await self._announce(word)
        if word.phase is GroupPhase.RUNNING:
            self._failures.begun()
        now_s = anyio.current_time()
        if coordinator.num_failed > self._num_failed:
            self._num_failed = coordinator.num_failed
            self._failures.failed(now_s)
        if word.phase is GroupPhase.GATHERING and (why := self._failures.verdict(now_s, for_good=coordinator.for_good)):
            raise RanksGivenUpError(f"{why}. {word.reason}")

    def _new_session(self) -> tuple[str, int]:
        return uuid.uuid4().hex, self._group.port or free_port(self._group.address)

    def _tell(self) -> None:
        """What status, top and report show."""
        word, metrics = self._leader, self._metrics
        reason = word.reason if word is not None and word.phase is GroupPhase.GATHERING else ""
        metrics.labels.pop(ERROR_LABEL, None)
        if reason:
            metrics.labels[ERROR_LABEL] = reason.splitlines()[0]
        metrics.gauges["ranks"] = float(self._group.num_ranks if self._phase is MemberPhase.RUNNING else 0)
        if self._phase is MemberPhase.RUNNING:
            metrics.work()
        elif self._coordinator is not None and (missing := self._coordinator.missing()):
            metrics.wait_for(f"{', '.join(missing)}, to begin with all {self._group.world_size} ranks")
        else:
            metrics.wait_for(f"node {self._group.leader} to begin a session")

    async def _listen(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self._broker.listen(words_subject(self._broker.run)) as words:
            task_status.started()
            async for _subject, data in words:
                word = msgspec.msgpack.decode(data, type=Word)
                if isinstance(word, MemberWord):
                    own = word.incarnation == self._incarnation
                    if own and word.beat < self._beat:
                        continue  # kept back while the broker was away: it says nothing about who gets through now
                    if self._coordinator is not None:
                        self._coordinator.hear(word)
                    if own:
                        self._silence.hear_own(word.beat)
                elif self._coordinator is None:
                    self._hear_leader(word)
                self._wake()

    def _hear_leader(self, word: LeaderWord) -> None:
        self._leader = word
        self._silence.hear(self._group.leader)

    async def _speak_now_and_then(self) -> None:
        while True:
            self._beat += 1
            await self._speak()
            if self._coordinator is not None:
                await self._announce(self._coordinator.word)
            self._wake()
            await anyio.sleep(BEAT_S)

    async def _speak(self) -> None:
        leaves = self._leaving and self._phase is MemberPhase.RUNNING
        await self._announce(
            MemberWord(
                node=self._group.node,
                incarnation=self._incarnation,
                beat=self._beat,
                phase=MemberPhase.LEAVING if leaves else self._phase,
                session=self._session,
                reason=self._reason,
                for_good=self._for_good,
            )
        )

    async def _announce(self, word: Word) -> None:
        try:
            await self._broker.announce(words_subject(self._broker.run), msgspec.msgpack.encode(word))
        except BrokerError as error:
            log.debug("a word to the other launchers was not said", error=str(error))

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


async def rank_specs(folder: RunFolder, group: RankGroup, word: LeaderWord) -> list[ProcessSpec]:
    """This node's ranks of a session."""
    interface = await anyio.to_thread.run_sync(_interface, group.address)
    return [
        ProcessSpec(
            name=f"rank {environment['RANK']}",
            argv=python("-m", "ops", "worker", "trainer", "--run-dir", str(folder.path)),
            env={name: text for name, text in environment.items() if not _is_chosen(name)},
            log_file=str(folder.logs / f"trainer-rank-{environment['RANK']}.log"),
            progress_file=_progress(folder) if environment["RANK"] == "0" else "",
            finishes=True,
            stop_deadline_s=_STOP_S,
            restart=RestartPolicy(max_restarts=0),
        )
        for environment in rank_environments(group, word, interface)
    ]


def _progress(folder: RunFolder) -> str:
    """Where rank 0 leaves its signs of progress."""
    return str(folder.progress / "trainer")


def training_digest(config: RunConfig) -> str:
    """Of all settings by which ranks compute a step, or end."""
    settings = [config.training, config.loss, config.assembly, config.run.seed, config.run.steps]
    return digest(msgspec.json.encode(settings, order="deterministic"))


def _is_chosen(name: str) -> bool:
    """Whether somebody chose the network interface for this node."""
    return name.endswith("_SOCKET_IFNAME") and name in os.environ


def _interface(address: str) -> str:
    try:
        found = {str(place[4][0]) for place in socket.getaddrinfo(address, None)}
    except OSError:
        return ""
    own = {name: [one.address for one in addresses] for name, addresses in psutil.net_if_addrs().items()}
    return interface_of(sorted(found), own)
