"""Which session of a user's own service plays which slot: a pure fold over the log, the same at every gateway.

    episode.requested ──▶ a free slot          session.claimed ──▶ a session with a slot, or void
    episode.ended ──────▶ the slot is done     group.closed ─────▶ its free slots are gone

A claim is decided by its place in the log alone, so gateways need no other arbiter: two that ask for the last slot at once
find the same winner. A group holds one task. Where rows are handed out the task is the row; where the service brings its own, a
group's first claim names it, and claims without a task make groups of their own, in the order of asking. Times are
the log's; nothing here knows a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from schemas.ids import session_id
from schemas.messages.rollout import EpisodeEnded, SessionClaimed, SessionClosed, SessionOpened, SessionRewarded
from schemas.messages.sampling import EpisodeRequested, GroupClosed

_REMEMBERED: Final = 65_536
"""Claims whose sessions are over; an older one that is said again is a new one."""


class Held(msgspec.Struct, kw_only=True):
    """A slot with the session that claimed it."""

    session: str
    claim: str
    task: str
    requested: EpisodeRequested
    claimed_s: float
    seen_s: float
    """When the log last spoke of it, calls left out."""
    gateway: str
    """Who has it."""
    opened: bool = False
    score: float | None = None
    turn_rewards: dict[str, float] = {}
    num_rewards: int = 0
    final: bool = False
    discard: bool = False
    closed: SessionClosed | None = None
    closed_s: float = 0.0
    group_closed: bool = False
    """Its group was closed before it ended: it is served, and no longer trained on."""

    @property
    def rewarded(self) -> bool:
        """Whether the service said what it is worth."""
        return self.score is not None or bool(self.turn_rewards)


class OpenGroup(msgspec.Struct, kw_only=True):
    """A group with slots that wait."""

    stream: str
    task: str | None
    """None: the first claim names it."""
    hands_out: bool
    """Its task is a row of the stream."""
    free: dict[tuple[int, int], EpisodeRequested] = {}
    """(slot, attempt) → what is asked for."""
    since_s: float
    """Of its issue, latest attempt or latest claim."""


class OnlineSlots:
    """The slots of a run's online streams."""

    def __init__(self, streams: Iterable[str]) -> None:
        self.streams: Final = frozenset(streams)
        self.groups: Final[dict[str, OpenGroup]] = {}
        """Open groups in the order of issue; those without a free slot stay, for their task."""
        self.held: Final[dict[str, Held]] = {}
        """By session."""
        self.owed: Final[dict[tuple[str, int, int], EpisodeRequested]] = {}
        """Next attempts that an end calls for and that do not stand yet."""
        self._claims: Final[OrderedDict[str, tuple[int, str]]] = OrderedDict()
        """claim → how often it was asked, its session; "" while void."""
        self._closed: Final[OrderedDict[str, None]] = OrderedDict()
        """Groups that were closed before one of their slots was asked for."""
        self.num_void = 0

    def take(self, message: msgspec.Struct, time_s: float) -> None:
        """The log's next message; kinds that say nothing about slots are passed over."""
        match message:
            case EpisodeRequested():
                self._offer(message, time_s)
            case SessionClaimed():
                self._claim(message, time_s)
            case SessionOpened():
                if (held := self.held.get(message.session)) is not None:
                    held.gateway, held.opened, held.seen_s = message.gateway, True, time_s
            case SessionRewarded():
                self._reward(message, time_s)
            case SessionClosed():
                if (held := self.held.get(message.session)) is not None and held.closed is None:
                    held.closed, held.closed_s = message, time_s
            case EpisodeEnded():
                self._end(message)
            case GroupClosed():
                self._close(message)
            case _:
                return

    def asked(self, claim: str) -> tuple[int, str]:
        """How often a claim was made, and the session that it has or had; "" while it is void."""
        return self._claims.get(claim, (0, ""))

    def find(self, stream: str, task: str) -> str | None:
        """The group in which a claim would get a slot now: one of its task first, then one that has none yet."""
        unnamed: str | None = None
        for name, group in self.groups.items():
            if group.stream != stream or not group.free:
                continue
            if group.task == task or (group.hands_out and not task):
                return name
            if group.task is None and unnamed is None:
                unnamed = name
        return unnamed

    def num_free(self, stream: str) -> int:
        """Slots of a stream that wait for a session."""
        return sum(len(group.free) for group in self.groups.values() if group.stream == stream)

    def _offer(self, requested: EpisodeRequested, time_s: float) -> None:
        if requested.stream not in self.streams:
            return
        self.owed.pop((requested.group, requested.slot, requested.attempt), None)
        if session_id(requested.group, requested.slot, requested.attempt, 0) in self.held:
            return
        group = self.groups.get(requested.group)
        if group is None:
            if requested.attempt or requested.group in self._closed:
                return
            hands_out = requested.prompt is not None
            group = self.groups[requested.group] = OpenGroup(
                stream=requested.stream,
                task=requested.data_id if hands_out else None,
                hands_out=hands_out,
                since_s=time_s,
            )
        group.since_s = max(group.since_s, time_s)
        group.free.setdefault((requested.slot, requested.attempt), requested)

    def _claim(self, claimed: SessionClaimed, time_s: float) -> None:
        times, session = self.asked(claimed.claim)
        if session:
            return  # asked again: it has its slot
        name = self.find(claimed.stream, claimed.task)
        self._claims[claimed.claim] = (max(times, claimed.ordinal + 1), "")
        self._claims.move_to_end(claimed.claim)
        if name is None:
            self.num_void += 1
        else:
            self._give(self.groups[name], claimed, time_s)
        while len(self._claims) > _REMEMBERED + len(self.held):
            self._claims.popitem(last=False)

    def _give(self, group: OpenGroup, claimed: SessionClaimed, time_s: float) -> None:
        slot = min(group.free)
        requested = group.free.pop(slot)
        if group.task is None:
            group.task = claimed.task
        group.since_s = time_s
        session = session_id(requested.group, requested.slot, requested.attempt, 0)
        self.held[session] = Held(
            session=session,
            claim=claimed.claim,
            task=claimed.task,
            requested=requested,
            claimed_s=time_s,
            seen_s=time_s,
            gateway=claimed.gateway,
        )
        self._claims[claimed.claim] = (self._claims[claimed.claim][0], session)

    def _reward(self, rewarded: SessionRewarded, time_s: float) -> None:
        held = self.held.get(rewarded.session)
        if held is None or rewarded.ordinal != held.num_rewards:
            return
        held.num_rewards += 1
        held.seen_s = time_s
        held.score = held.score if rewarded.score is None else rewarded.score
        held.turn_rewards = {**held.turn_rewards, **rewarded.turn_rewards}
        held.final, held.discard = rewarded.final, held.discard or rewarded.discard

    def _end(self, ended: EpisodeEnded) -> None:
        if ended.stream not in self.streams:
            return
        held = self.held.pop(session_id(ended.group, ended.slot, ended.attempt, 0), None)
        group = self.groups.get(ended.group)
        free = group.free.pop((ended.slot, ended.attempt), None) if group is not None else None
        requested = held.requested if held is not None else free
        if not ended.final and requested is not None and group is not None:
            again = msgspec.structs.replace(requested, attempt=ended.attempt + 1)
            if (ended.slot, again.attempt) not in group.free:
                self.owed[ended.group, ended.slot, again.attempt] = again

    def _close(self, closed: GroupClosed) -> None:
        if closed.stream not in self.streams:
            return
        if self.groups.pop(closed.group, None) is None:
            self._closed[closed.group] = None
            if len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)
            return
        for held in self.held.values():
            if held.requested.group == closed.group:
                held.group_closed = True
        for key in [key for key in self.owed if key[0] == closed.group]:
            del self.owed[key]
