"""What is known of a run at this moment, and its recent history. Takes in what it is told; asks nobody."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import msgspec

from ops.control import Standing
from ops.status import service_of
from ops.troubles import Trouble, troubles
from pipeline.generations import Generations
from pipeline.metrics import WorkerReport
from pipeline.presence import Presence, dead_nodes, missing, obituary
from schemas.messages.engines import EngineAnnouncement
from schemas.messages.rollout import Trajectory
from schemas.messages.sampling import DeadDropped, DeadLetter, DeadRetry, GroupClosed, GroupIssued
from schemas.messages.training import StepAssembled, StepTrained

GROUPS_KEPT: Final = 200
STEPS_KEPT: Final = 400
HEARD_S: Final = 10.0
"""What a worker told longer ago is not held against it."""
FORGET_S: Final = 120.0
"""A worker that was silent for so long is no longer shown."""


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """What waits before a stage."""

    count: int
    at_least: bool = False
    """There is more; it was not counted further."""
    oldest_unix_s: float = 0.0
    """When the oldest of it was put on the log; 0: nothing waits."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with its speed since its report before."""

    report: WorkerReport
    received_per_s: float = 0.0
    published_per_s: float = 0.0


class GroupLine(msgspec.Struct, kw_only=True):
    """A group, as far as it has come."""

    group: str
    stream: str
    num_slots: int
    issued_unix_s: float
    sequence: int
    """Of its issue."""
    ready: int = 0
    """Slots whose trajectory is there."""
    rejected: int = 0
    reward_sum: float = 0.0
    state: str = "running"
    """running, waiting, step N, trained N, or dropped: reason."""
    step: int = 0

    @property
    def reward(self) -> float | None:
        """Mean over its usable slots."""
        usable = self.ready - self.rejected
        return self.reward_sum / usable if usable else None


class Model:
    """The latest of everything. Plain attributes: views read them, nobody else writes them."""

    def __init__(self, run: str, *, is_running: bool = True) -> None:
        self.run: Final = run
        self.is_running: Final = is_running
        self.workers: Final[dict[tuple[str, str], Worker]] = {}
        self.engines: Final[dict[str, EngineAnnouncement]] = {}
        """Servers behind the router, by name."""
        self.backlogs: dict[str, Backlog] = {}
        self.groups: Final[dict[str, GroupLine]] = {}
        """The newest ones, in the order of their issue."""
        self.rewards: Final[deque[tuple[int, float]]] = deque(maxlen=STEPS_KEPT)
        self.stream_rewards: Final[dict[str, deque[float]]] = {}
        """By stream, in the order of the steps that had it."""
        self.staleness: Final[deque[int]] = deque(maxlen=STEPS_KEPT)
        self.step_seconds: Final[deque[float]] = deque(maxlen=STEPS_KEPT)
        self.stats: dict[str, float] = {}
        """Of the newest step's update."""
        self.assembled_step = 0
        self.trained_step = 0
        self.asked = Standing()
        self.dead: Final[dict[str, int]] = {}
        """Letters by stage."""
        self.open_letters: Final[set[tuple[str, int]]] = set()
        """Stage and sequence of those that nobody has dropped or sent again."""
        self.roll: list[Presence] = []
        """Every process that did not end in good order."""
        self.position = 0
        """Up to where the log was read."""
        self.log_messages = 0
        self.log_bytes = 0
        self.problem = ""
        """Why nothing new comes; empty while the broker answers."""
        self._assembled: Final[dict[int, tuple[float, int]]] = {}
        self._generations: Final = Generations()

    def take_report(self, report: WorkerReport) -> None:
        """A worker's announcement."""
        key = (report.stage, report.worker)
        before = self.workers.get(key)
        passed_s = report.unix_time_s - before.report.unix_time_s if before else 0.0
        if before is None or passed_s <= 0:
            self.workers[key] = Worker(report=report)
            return
        self.workers[key] = Worker(
            report=report,
            received_per_s=max(0, report.received - before.report.received) / passed_s,
            published_per_s=max(0, report.published - before.report.published) / passed_s,
        )

    def forget_silent(self, now_s: float) -> None:
        """Leave out workers that are gone for good."""
        for key, worker in list(self.workers.items()):
            if now_s - worker.report.unix_time_s > FORGET_S:
                del self.workers[key]
        for name, engine in list(self.engines.items()):
            if now_s - engine.unix_time_s > FORGET_S:
                del self.engines[name]

    def take(self, message: msgspec.Struct, sequence: int, unix_time_s: float) -> None:
        """A message of the log, in its order."""
        self.position = sequence
        self.asked = self.asked.after(message, unix_time_s)
        match message:
            case GroupIssued():
                self.groups[message.group] = GroupLine(
                    group=message.group,
                    stream=message.stream,
                    num_slots=message.num_slots,
                    issued_unix_s=unix_time_s,
                    sequence=sequence,
                )
                while len(self.groups) > GROUPS_KEPT:
                    del self.groups[next(iter(self.groups))]
            case Trajectory():
                if (line := self.groups.get(message.group)) is not None:
                    line.ready += 1
                    line.rejected += message.rejected
                    line.reward_sum += message.reward or 0.0
            case GroupClosed():
                if (line := self.groups.get(message.group)) is not None:
                    line.state = "waiting" if message.usable else f"dropped: {message.reason}"
            case StepAssembled():
                self._assemble(message)
            case StepTrained() if self._generations.admits(message.generation):
                self._train(message)
            case DeadLetter():
                stage = service_of(message.stage)
                self.dead[stage] = self.dead.get(stage, 0) + 1
                self.open_letters.add((message.stage, message.sequence))
            case DeadDropped() | DeadRetry():
                self.open_letters.discard((message.stage, message.sequence))
            case _:
                pass

    def _assemble(self, message: StepAssembled) -> None:
        self.assembled_step = max(self.assembled_step, message.step)
        self._assembled[message.step] = (message.mean_reward, message.step - 1 - message.min_version)
        for name in message.groups:
            if (line := self.groups.get(name)) is not None:
                line.state, line.step = f"in step {message.step}", message.step
        for dropped in message.dropped:
            if (line := self.groups.get(dropped.group)) is not None:
                line.state = f"dropped: {dropped.reason}"

    def _train(self, message: StepTrained) -> None:
        if message.step <= self.trained_step:
            return
        self.trained_step = message.step
        self.stats = message.stats
        self.step_seconds.append(message.seconds)
        reward, staleness = self._assembled.pop(message.step, (0.0, 0))
        self.rewards.append((message.step, reward))
        self.staleness.append(staleness)
        for line in self.groups.values():
            if line.step == message.step:
                line.state = f"trained in {message.step}"

    def troubles(self, now_s: float) -> list[Trouble]:
        """What is wrong, worst first; nothing of a run that is over."""
        if not self.is_running:
            return []
        letters = Counter(service_of(stage) for stage, _ in self.open_letters)
        fresh = [worker.report for worker in self.workers.values() if now_s - worker.report.unix_time_s <= HEARD_S]
        dead = missing(self.roll, heard=frozenset(report.worker for report in fresh), now=now_s)
        return troubles(
            fresh,
            engines=self.engines.values(),
            dead=[obituary(one, now=now_s) for one in dead],
            dead_nodes=dead_nodes(self.roll, dead),
            dead_letters=letters,
            now_s=now_s,
        )

    def take_stream_rewards(self, rewards: dict[str, float]) -> None:
        """Mean rewards of one step, by stream."""
        for stream, reward in rewards.items():
            self.stream_rewards.setdefault(stream, deque(maxlen=STEPS_KEPT)).append(reward)
