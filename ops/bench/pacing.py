"""The loop in simulated time: the real folds of sampling and assembly, and an engine, a trainer and a broadcast that only take time.

    sampling fold ──group.issued──▶ slots wait for room and their version ──▶ engine ──trajectory.ready──▶ assembly fold
         ▲                                                                      ▲                              │ step.assembled
         └───────────────────── step.trained ◀── trainer, one step at a time ◀──┼──────────────────────────────┘
                                      └── broadcast ──▶ engine's version ───────┘

Everything is a function of the settings: no clock, no threads. The log that comes out can be scanned by whoever doubts it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from pipeline.fold import Output
from schemas.ids import row_id
from schemas.messages.rollout import EpisodeClass, Row, Trajectory
from schemas.messages.sampling import GroupClosed, GroupIssued, RunFinished, RunStarted, StreamListed, StreamRow
from schemas.messages.training import Manifest, StepAssembled, StepTrained
from schemas.payload import PayloadRef, run_ref
from stages.assembly.fold import AssemblyFold
from stages.assembly.settings import AssemblySettings
from stages.sampling.fold import SamplingFold
from stages.sampling.settings import SamplingSettings

STREAM: Final = "simulated"


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast everything is. Times are simulated seconds; a rollout's duration is log-normal."""

    groups_per_step: int = 16
    slots_per_group: int = 8
    max_staleness: int
    max_concurrent_groups: int = 10_000
    engine_slots: int
    """Rollouts that the engine runs at once, each as fast as alone."""
    median_s: float = 1.0
    """Of a rollout's duration."""
    sigma: float
    """Standard deviation of the duration's logarithm; p99 / median = exp(2.326 · sigma)."""
    train_s: float
    broadcast_s: float
    """From step.trained until the engine serves the new weights; rollouts that run go on meanwhile."""
    steps: int = 100
    seed: int = 0


class Course(msgspec.Struct, kw_only=True):
    """What a simulated run was like."""

    seconds: float = 0.0
    """Until the last step was trained."""
    step_seconds: list[float] = []
    """When each step was trained."""
    trained_rows: int = 0
    finished_rollouts: int = 0
    dropped_groups: dict[str, int] = {}
    """By reason."""
    stale_slots: int = 0
    """Slots that were dropped as too old out of groups that were trained."""
    busy_slot_s: float = 0.0
    engine_slots: int
    no_request_s: float = 0.0
    """How long the engine had nothing to do at all."""
    log: list[msgspec.Struct] = []
    """All messages in order."""
    payloads: dict[str, bytes] = {}

    @property
    def idle_share(self) -> float:
        """Share of the engine's places that were empty, over the run."""
        return 1.0 - self.busy_slot_s / (self.engine_slots * self.seconds)

    def manifests(self) -> list[Manifest]:
        """The batch of each step, as trainers read it."""
        return [
            msgspec.msgpack.decode(self.payloads[message.manifest.id], type=Manifest)
            for message in self.log
            if isinstance(message, StepAssembled)
        ]


class LivelockError(Exception):
    """Nothing is on its way and the run is not over."""


class _Waiting(msgspec.Struct, frozen=True):
    group: GroupIssued
    slot: int


class _Simulation:
    def __init__(self, pace: Pace) -> None:
        self.pace: Final = pace
        self.now_s = 0.0
        self.sampling: Final = SamplingFold(sampling_settings(pace))
        self.assembly: Final = AssemblyFold(assembly_settings(pace))
        self.states: Final = (self.sampling.initial(), self.assembly.initial())
        self.course: Final = Course(engine_slots=pace.engine_slots)
        self.events: Final[list[tuple[float, int, Callable[[], None]]]] = []
        self.num_events = 0
        self.waiting: Final[deque[_Waiting]] = deque()
        self.running = 0
        self.version = 0
        self.to_train: Final[deque[StepAssembled]] = deque()
        self.training = False
        self.finished = False

    def run(self) -> Course:
        rows = msgspec.msgpack.encode([StreamRow(data_id=f"p{number}") for number in range(997)])
        listed = StreamListed(stream=STREAM, rows=run_ref(rows), num_rows=997, weight=1.0)
        ref = self.sampling.wants(listed)
        if ref is not None:
            self.sampling.load(ref, memoryview(rows))
        self.say(
            RunStarted(
                ordinal=0, config_json=b"", config_digest="", headrace_version="0", steps=self.pace.steps, epochs=None
            )
        )
        self.say(listed)
        while not self.finished:
            if not self.events or math.isinf(self.events[0][0]):
                raise LivelockError(
                    f"after {len(self.course.step_seconds)} steps: {len(self.waiting)} slots wait, engine at version "
                    f"{self.version}; sampling: {self.sampling.describe(self.states[0])[0]}"
                )
            at_s, _, happen = heapq.heappop(self.events)
            self.pass_time(at_s)
            happen()
        self.course.seconds = self.now_s
        return self.course

    def pass_time(self, at_s: float) -> None:
        elapsed = at_s - self.now_s
        self.course.busy_slot_s += elapsed * self.running
        self.course.no_request_s += elapsed * (self.running == 0)
        self.now_s = at_s

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        self.num_events += 1  # ties happen in the order in which they were planned
        heapq.heappush(self.events, (self.now_s + delay_s, self.num_events, happen))

    def say(self, message: msgspec.Struct) -> None:
        """A message onto the log: the folds that consume it answer, and so on."""
        pending = deque([message])
        while pending:
            told = pending.popleft()
            self.course.log.append(told)
            self.react(told)
            for fold, state in zip((self.sampling, self.assembly), self.states, strict=True):
                if any(topic.message is type(told) for topic in fold.consumes):
                    for output in fold.step(state, told):  # pyright: ignore[reportArgumentType] - each fold has its own state
                        self.keep(output)
                        pending.append(output.message)
        self.admit()

    def keep(self, output: Output) -> None:
        for data in output.payloads:
            self.course.payloads[run_ref(data).id] = data

    def react(self, told: msgspec.Struct) -> None:
        """What is no fold."""
        match told:
            case GroupIssued():
                self.waiting.extend(_Waiting(told, slot) for slot in range(told.num_slots))
            case StepAssembled():
                self.to_train.append(told)
                for dropped in told.dropped:
                    self.course.dropped_groups[dropped.reason] = self.course.dropped_groups.get(dropped.reason, 0) + 1
                self.train()
            case GroupClosed():
                self.course.stale_slots += told.num_rejected if told.usable else 0
            case RunFinished():
                self.finished = True
            case _:
                pass

    def admit(self) -> None:
        """Start what may start: the first that waits for nothing but room; a newer version holds up nobody else."""
        held: deque[_Waiting] = deque()
        while self.waiting and self.running < self.pace.engine_slots:
            one = self.waiting.popleft()
            if one.group.min_version > self.version:
                held.append(one)
                continue
            self.running += 1
            self.after(self.duration_s(one), lambda one=one, version=self.version: self.end(one, version))
        self.waiting.extendleft(reversed(held))

    def duration_s(self, one: _Waiting) -> float:
        """By the group's number and the slot alone: every setting sees the same rollouts."""
        random = np.random.default_rng([self.pace.seed, one.group.ordinal, one.slot])
        return self.pace.median_s * float(np.exp(self.pace.sigma * random.standard_normal()))

    def end(self, one: _Waiting, version: int) -> None:
        self.running -= 1
        self.course.finished_rollouts += 1
        group, reward = one.group, float((one.group.ordinal * 7 + one.slot * 3) % 5) / 4
        row = Row(
            row=row_id(group.group, one.slot, 0),
            tokens=PayloadRef(store="run", id=f"{group.ordinal:016x}{one.slot:016x}", size_bytes=4096),
            num_tokens=900,
            num_loss_tokens=300,
            min_version=version,
            max_version=self.version,
            reward=reward,
        )
        self.say(
            Trajectory(
                group=group.group,
                slot=one.slot,
                attempt=0,
                session=f"s{group.ordinal}-{one.slot}",
                stream=group.stream,
                data_id=group.data_id,
                outcome=EpisodeClass.SCORED,
                rejected=False,
                rows=[row],
                score=reward,
                reward=reward,
                solved=reward > 0.5,
                num_interactions=1,
                num_completion_tokens=300,
            )
        )

    def train(self) -> None:
        if not self.training and self.to_train:
            self.training = True
            self.after(self.pace.train_s, self.trained)

    def trained(self) -> None:
        step = self.to_train.popleft()
        self.training = False
        self.course.step_seconds.append(self.now_s)
        self.course.trained_rows += step.num_rows
        self.after(self.pace.broadcast_s, lambda: self.load(step.step))
        self.train()
        self.say(StepTrained(step=step.step, generation=1, digest="", manifest_id=""))

    def load(self, version: int) -> None:
        self.version = max(self.version, version)
        self.admit()


def sampling_settings(pace: Pace) -> SamplingSettings:
    """Of the sampling fold."""
    return SamplingSettings(
        streams=(STREAM,),
        groups_per_step=pace.groups_per_step,
        slots_per_group=pace.slots_per_group,
        max_staleness=pace.max_staleness,
        max_concurrent_groups=pace.max_concurrent_groups,
    )


def assembly_settings(pace: Pace) -> AssemblySettings:
    """Of the assembly fold."""
    return AssemblySettings(
        run="simulated",
        groups_per_step=pace.groups_per_step,
        slots_per_group=pace.slots_per_group,
        max_staleness=pace.max_staleness,
    )


def simulate(pace: Pace) -> Course:
    """A whole run.

    Raises:
        LivelockError: it can't go on.
    """
    return _Simulation(pace).run()
