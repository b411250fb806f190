"""For how many more groups a run's store has room, told from what groups took before: pure.

    usable share of the limit                       │ stored │ still to come of groups under way │ the next weights │ free │
    free ÷ what the largest of the last groups took = groups that may be issued beside those that were

A group is under way from when it is issued until it is trained or dropped, and counts as large as the largest one: whatever it still
writes finds room. What is purged meanwhile is not counted on: a group that may be issued has its room already. This module
must not know brokers or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from broker.recording.references import NamedPayload
from schemas.messages.sampling import GroupClosed, GroupIssued, RunStarted
from schemas.messages.training import StepAssembled, StepTrained
from schemas.payload import INLINE

USABLE_SHARE: Final = 0.9
"""Of a limit; the rest is for ends, steps, marks, control and checkpoints."""
LAST_GROUPS: Final = 256
MESSAGE_OVERHEAD_BYTES: Final = 150
"""What a server stores with a message: its frame, its headers."""
PAYLOAD_OVERHEAD_BYTES: Final = 250


class Size(msgspec.Struct):
    """Bytes in the log and in the payload store."""

    log: int = 0
    payloads: int = 0


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """A store: what it holds and what it may hold; no limit: 0 or less."""

    used_bytes: int
    limit_bytes: int


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What groups took so far."""

    num_issued: int
    """Ordinal of the next one."""
    num_under_way: int
    """Issued, and neither trained nor dropped."""
    num_ended: int
    largest: Size
    to_come: Size
    """What those under way still write, if each becomes as large as the largest."""
    other: Size
    """The largest message of no group, with what it names."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What `room` found."""

    groups: int
    """That may be issued beside those that were."""
    group_bytes: int
    """What a group takes, of the store that binds."""
    free_bytes: int
    """For more groups, in that store."""


NO_LIMIT: Final = Room(groups=2**40, group_bytes=0, free_bytes=0)
"""Of a store without limits."""


class GroupSizes:
    """Follows the log: what each group takes."""

    def __init__(self, *, trains: bool) -> None:
        """Args:
        trains: False: a group is under way until it is closed.
        """
        self.told_at_start: int | None = None
        """The first group for which the run's first start knew no room."""
        self.num_issued = 0
        self._trains: Final = trains
        self._open: Final[dict[str, Size]] = {}
        self._seen: Final[dict[str, set[str]]] = {}
        """Open group → payloads that were counted."""
        self._steps: Final[dict[int, list[str]]] = {}
        self._last: Final[deque[Size]] = deque(maxlen=LAST_GROUPS)
        self._other = Size()
        """The largest message of no group, with what it names."""

    def add(self, key: str, size_bytes: int, named: Iterable[NamedPayload]) -> None:
        """A message stands on the log.

        Args:
            key: the first token of its key: a group, or a session of one.
            size_bytes: of its subject and data.
            named: the payloads that it names.
        """
        group = _group(key)
        stored = {one.ref.id: one.ref.size_bytes for one in named if one.ref.store != INLINE}
        size = self._open.get(group)
        if size is None:
            payloads = sum(bytes_ + PAYLOAD_OVERHEAD_BYTES for bytes_ in stored.values())
            self._other.log = max(self._other.log, size_bytes + MESSAGE_OVERHEAD_BYTES)
            self._other.payloads = max(self._other.payloads, payloads)
            return
        seen = self._seen.setdefault(group, set())
        size.log += size_bytes + MESSAGE_OVERHEAD_BYTES
        size.payloads += sum(
            bytes_ + PAYLOAD_OVERHEAD_BYTES for payload, bytes_ in stored.items() if payload not in seen
        )
        seen.update(stored)

    def is_open(self, key: str) -> bool:
        """Whether a message with this key belongs to a group that is under way."""
        return _group(key) in self._open

    def take(self, message: msgspec.Struct) -> None:
        """What a message says of groups; before `add` of an issued group, after it of all else."""
        match message:
            case RunStarted():
                if self.told_at_start is None:
                    self.told_at_start = message.issue_below
            case GroupIssued():
                self._open.setdefault(message.group, Size())
                self.num_issued = max(self.num_issued, message.ordinal + 1)
            case GroupClosed():
                if message.evaluation or not message.usable or not self._trains:
                    self._end(message.group)
            case StepAssembled():
                self._steps[message.step] = message.groups
                self._share(message)
                for dropped in message.dropped:
                    self._end(dropped.group)
            case StepTrained():
                for step in [step for step in self._steps if step <= message.step]:
                    for group in self._steps.pop(step):
                        self._end(group)
            case _:
                pass

    def _share(self, assembled: StepAssembled) -> None:
        """A step's manifest is stored for its groups."""
        each = (assembled.manifest.size_bytes + PAYLOAD_OVERHEAD_BYTES) // max(1, len(assembled.groups))
        for group in assembled.groups:
            if group in self._open:
                self._open[group].payloads += each

    def _end(self, group: str) -> None:
        size = self._open.pop(group, None)
        self._seen.pop(group, None)
        if size is not None:
            self._last.append(size)

    def taken(self) -> Taken:
        """What groups took as far as the log was read."""
        sizes = [*self._last, *self._open.values()]
        largest = Size(max((size.log for size in sizes), default=0), max((size.payloads for size in sizes), default=0))
        return Taken(
            num_issued=self.num_issued,
            num_under_way=len(self._open),
            num_ended=len(self._last),
            largest=largest,
            to_come=Size(
                sum(largest.log - size.log for size in self._open.values()),
                sum(largest.payloads - size.payloads for size in self._open.values()),
            ),
            other=Size(self._other.log, self._other.payloads),
        )


def room(taken: Taken, log: Fill, payloads: Fill) -> Room | None:
    """For how many more groups there is room; None while no group has ended.

    Args:
        taken: told before the stores were looked at: what is written between the two looks counts twice, not never.
        log, payloads: the stores.
    """
    if not taken.num_ended:
        return None
    rooms = [
        _room(log, taken.to_come.log + taken.other.log, taken.largest.log),
        _room(payloads, taken.to_come.payloads + taken.other.payloads, taken.largest.payloads),
    ]
    return min((one for one in rooms if one is not None), key=lambda one: one.groups, default=NO_LIMIT)


def _group(key: str) -> str:
    return key.partition("-")[0]


def _room(store: Fill, to_come_bytes: int, group_bytes: int) -> Room | None:
    if store.limit_bytes <= 0 or group_bytes <= 0:
        return None
    free = max(0, int(USABLE_SHARE * store.limit_bytes) - store.used_bytes - to_come_bytes)
    return Room(groups=free // group_bytes, group_bytes=group_bytes, free_bytes=free)
