"""What a run still needs of its log, and so how far it may be purged: pure.

    open groups ─────────────┐
    fold checkpoints ────────┤
    durables' unacknowledged ┼──▶ low-water mark = the lowest of all ──▶ messages below may go, then their payloads
    steps not in the oldest  │
      kept trainer checkpoint┤
    holds of readers ────────┘

Inputs of a run (starts, listed streams, prompts, instructions) and dead letters stay for good: they are few. So do two sets of
weights: the newest, which an engine that joins loads, and the ones that were published last, whose pieces the next ones take
over without storing them again. After a trainer went back to a checkpoint these are not the same for a while. This module must not know brokers or clocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from broker.api import ConsumerStatus
from broker.recording.references import NamedPayload
from schemas.messages.sampling import GroupClosed, GroupIssued, LogHold
from schemas.messages.training import FoldCheckpoint, StepAssembled, StepTrained, WeightsPublished
from schemas.topics import (
    DEAD_DROPPED,
    DEAD_LETTER,
    DEAD_RETRY,
    PROMPT_PUBLISHED,
    RUN_CONTROL,
    RUN_FINISHED,
    RUN_STARTED,
    STREAM_LISTED,
    WEIGHTS_PUBLISHED,
)

TIME_EVERY_MESSAGES: Final = 16
TIME_EVERY_S: Final = 1.0
"""How finely the times of messages are known: a burst moves the mark within a second, and its payloads must go with it."""
KEPT_TOPICS: Final = frozenset(
    topic.name
    for topic in (
        RUN_STARTED,
        RUN_FINISHED,
        RUN_CONTROL,
        STREAM_LISTED,
        PROMPT_PUBLISHED,
        DEAD_LETTER,
        DEAD_RETRY,
        DEAD_DROPPED,
    )
)
"""Never purged."""
_FOR_GOOD: Final = 2**62
_PAYLOADS_OF_WEIGHTS: Final = WEIGHTS_PUBLISHED.name


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody needs the log from a sequence on."""

    sequence: int
    held_by: str
    """In words."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The low-water mark: nobody needs what lies below."""

    sequence: int
    held_by: str
    """Who needs the message at it; empty: nobody holds anything back."""


def mark_of(needs: Iterable[Need], *, end: int) -> Mark:
    """The lowest need; with none, just above `end`, the last message that was looked at."""
    lowest = min(needs, key=lambda need: need.sequence, default=None)
    if lowest is None or lowest.sequence > end:
        return Mark(sequence=end + 1, held_by="")
    return Mark(sequence=max(0, lowest.sequence), held_by=lowest.held_by)


class LogNeeds:
    """Follows the log: which groups are open and which steps are not yet in a kept checkpoint."""

    def __init__(self, *, trains: bool) -> None:
        """Args:
        trains: False: a usable group waits for nothing when it is closed.
        """
        self.sequence = 0
        """Everything up to here was looked at."""
        self.newest_weights = 0
        """Sequence of the weights that an engine would load now."""
        self._last_weights = 0
        self._trains: Final = trains
        self._groups: Final[dict[str, int]] = {}
        """Open → where it was issued, in the order of the log."""
        self._steps: Final[dict[int, int]] = {}
        """Assembled and not in the oldest kept checkpoint → where."""
        self._weights = (-1, -1)
        self._weights_generation = -1
        self._generation = -1
        self._oldest_checkpoint = 0

    def take(self, sequence: int, message: msgspec.Struct | None) -> None:
        """Look at a message; None: one that nothing follows from."""
        self.sequence = sequence
        match message:
            case GroupIssued():
                self._groups.setdefault(message.group, sequence)
            case GroupClosed():
                if message.evaluation or not message.usable or not self._trains:
                    self._groups.pop(message.group, None)
            case StepAssembled():
                self._steps.setdefault(message.step, sequence)
                for group in message.groups:
                    self._groups.pop(group, None)
                for dropped in message.dropped:
                    self._groups.pop(dropped.group, None)
            case StepTrained():
                self._train(message)
            case WeightsPublished():
                self._publish(sequence, message)
            case _:
                pass

    def _publish(self, sequence: int, published: WeightsPublished) -> None:
        if published.generation < self._weights_generation:
            return  # engines pass over what a superseded trainer says
        self._weights_generation, self._last_weights = published.generation, sequence
        if (published.version, published.generation) >= self._weights:
            self._weights = (published.version, published.generation)
            self.newest_weights = sequence

    @property
    def kept_weights(self) -> frozenset[int]:
        """Sequences of the weights that stay, wherever the mark stands."""
        return frozenset({self.newest_weights, self._last_weights} - {0})

    def _train(self, trained: StepTrained) -> None:
        if trained.generation < self._generation:
            return  # a superseded trainer's word about checkpoints counts no more
        self._generation = trained.generation
        self._oldest_checkpoint = trained.oldest_checkpoint_step
        for step in [step for step in self._steps if step <= trained.oldest_checkpoint_step]:
            del self._steps[step]

    def needs(self) -> Iterator[Need]:
        """What the groups and the trainer need."""
        group = next(iter(self._groups), None)
        if group is not None:
            others = len(self._groups) - 1
            more = f" and {others} later ones" if others else ""
            yield Need(sequence=self._groups[group], held_by=f"open group {group}{more}")
        if self._steps:
            step = min(self._steps)
            kept = self._oldest_checkpoint
            held_by = (
                f"trainer: its oldest kept checkpoint is step {kept}" if kept else "trainer: no kept checkpoint yet"
            )
            yield Need(sequence=min(self._steps.values()), held_by=f"{held_by}, so step {step} may be trained again")


def fold_needs(checkpoints: Mapping[str, FoldCheckpoint | None]) -> Iterator[Need]:
    """What folds need to start again."""
    for name, checkpoint in checkpoints.items():
        if checkpoint is None:
            yield Need(sequence=0, held_by=f"fold {name}: no checkpoint yet")
        else:
            yield Need(sequence=checkpoint.sequence + 1, held_by=f"fold {name}: its checkpoint")


def durable_needs(expected: Sequence[str], found: Sequence[ConsumerStatus]) -> Iterator[Need]:
    """What stateless stages have not acknowledged. One that has nothing left needs nothing."""
    for name in set(expected) - {status.durable for status in found}:
        yield Need(sequence=0, held_by=f"stage {name}: never started yet")
    for status in found:
        if status.num_pending or status.num_ack_pending:
            words = f"{status.num_pending} messages waiting, {status.num_ack_pending} in hand"
            yield Need(sequence=status.ack_floor + 1, held_by=f"stage {status.durable}: {words}")


def hold_needs(holds: Mapping[str, LogHold]) -> Iterator[Need]:
    """What readers asked for."""
    for hold in holds.values():
        yield Need(sequence=hold.sequence, held_by=hold.what)


class PayloadUses:
    """Which payloads the log still names, by the last message that does."""

    def __init__(self) -> None:
        self._last: Final[dict[str, int]] = {}
        self._of_weights: Final[dict[int, set[str]]] = {}
        """Sequence of weights → their payloads: later ones that name the same may be purged before these."""
        self._times: Final[list[tuple[int, float]]] = []
        """(sequence, time) of messages about a second apart, ascending."""

    def __len__(self) -> int:
        return len(self._last)

    def take(self, sequence: int, topic: str, named: Iterable[NamedPayload]) -> None:
        """A message names payloads, itself or through one of them."""
        place = _FOR_GOOD if topic in KEPT_TOPICS else sequence
        for payload in named:
            self._last[payload.ref.id] = max(place, self._last.get(payload.ref.id, 0))
            if topic == _PAYLOADS_OF_WEIGHTS:
                self._of_weights.setdefault(sequence, set()).add(payload.ref.id)

    def passed(self, sequence: int, unix_time_s: float) -> None:
        """A message was stored at a time."""
        last = self._times[-1] if self._times else (-TIME_EVERY_MESSAGES, 0.0)
        if sequence - last[0] >= TIME_EVERY_MESSAGES or unix_time_s - last[1] >= TIME_EVERY_S:
            self._times.append((sequence, unix_time_s))

    def time_of(self, sequence: int) -> float:
        """A time no later than that of the message at `sequence`; 0 if it is not known."""
        place = bisect_right(self._times, sequence, key=lambda kept: kept[0])
        return self._times[place - 1][1] if place else 0.0

    def is_named(self, payload_id: str, mark: int, weights: Collection[int]) -> bool:
        """Whether a message at or above the mark names it, or one of the `weights` that stay does."""
        return self._last.get(payload_id, -1) >= mark or any(
            payload_id in self._of_weights.get(sequence, ()) for sequence in weights
        )

    def forget_below(self, mark: int, weights: Collection[int]) -> None:
        """Drop what is known about payloads that nobody needs, and old times but the newest of them."""
        for sequence in [found for found in self._of_weights if found < mark and found not in weights]:
            del self._of_weights[sequence]
        kept = frozenset[str]().union(*self._of_weights.values())
        for payload_id in [name for name, last in self._last.items() if last < mark and name not in kept]:
            del self._last[payload_id]
        while len(self._times) > 1 and self._times[1][0] <= mark:
            del self._times[0]


def purges(run: str, topics: Iterable[str], mark: int, weights: Collection[int]) -> list[tuple[str, int]]:
    """What to purge: for each topic that is not kept for good its filter, and the sequence below which."""
    found: list[tuple[str, int]] = []
    for topic in topics:
        if topic in KEPT_TOPICS:
            continue
        floor = min([mark, *weights]) if topic == _PAYLOADS_OF_WEIGHTS else mark
        found.append((f"hr.{run}.{topic}.>", floor))
    return found
