"""A trainer over several nodes: which ranks are where, and how their launchers agree on one group at a time. Pure.

    launcher of each node ── MemberWord ──▶ the leading node's coordinator ── LeaderWord ──▶ every launcher

    gathering ── all are there and have no ranks ──▶ running (a new session) ── all have finished ──▶ finished
        ▲                                               │
        │◀── a rank died, a node is silent ─────────────┤   every rank is killed
        └◀── all have stopped ── ending ◀── one leaves ─┘   every rank ends after its step

Words are announced every `BEAT_S` and at each change. A session is a group of ranks that never gets another member: its id
parts its ranks from those of another. Silence is counted in beats that the listener hears of itself, so that a broker that is
away ends nothing: then nobody hears anybody.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

BEAT_S: Final = 1.0
GROUP_ENV: Final = "HEADRACE_TRAINER_GROUP"
"""A RankGroup as JSON, in the environment of a node's launcher."""
SESSION_ENV: Final = "HEADRACE_TRAINER_SESSION"
"""In the environment of each rank: which group it belongs to."""
_FIRST_DELAY_S: Final = 0.2
_MOST_DELAY_S: Final = 10.0


class RanksGivenUpError(Exception):
    """Ranks died again and again; the text has the last one's last lines."""


class RankMember(msgspec.Struct, frozen=True, kw_only=True):
    """A node with ranks."""

    node: str
    num_ranks: int


class RankGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of a trainer over several nodes, as one node knows them."""

    node: str
    """This one."""
    address: str
    """Of this one."""
    members: tuple[RankMember, ...]
    """In order of rank; the first leads: rank 0 is there."""
    master: str
    """Address of the leading node."""
    port: int
    """Where ranks meet there; 0: any free one."""

    @property
    def leader(self) -> str:
        """The leading node."""
        return self.members[0].node

    @property
    def leads(self) -> bool:
        """Whether this node does."""
        return self.node == self.leader

    @property
    def world_size(self) -> int:
        """All ranks."""
        return sum(member.num_ranks for member in self.members)

    @property
    def num_ranks(self) -> int:
        """Ranks of this node."""
        return next(member.num_ranks for member in self.members if member.node == self.node)

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node."""
        place = [member.node for member in self.members].index(self.node)
        return sum(member.num_ranks for member in self.members[:place])


class GroupPhase(StrEnum):
    """Where the coordinator stands."""

    GATHERING = "gathering"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


class MemberPhase(StrEnum):
    """Where a node's ranks stand."""

    IDLE = "idle"
    """None runs."""
    RUNNING = "running"
    FAILED = "failed"
    FINISHED = "finished"
    """All have done the trainer's work."""
    LEAVING = "leaving"
    """The node is told to leave."""
    LEFT = "left"


class LeaderWord(msgspec.Struct, frozen=True, kw_only=True, tag="leader"):
    """What the coordinator says."""

    incarnation: str
    phase: GroupPhase
    session: str = ""
    port: int = 0
    """Where the session's ranks meet."""
    reason: str = ""
    """Why the former session ended."""
    settings: str = ""
    """Digest of what must be the same for all ranks."""


class MemberWord(msgspec.Struct, frozen=True, kw_only=True, tag="member"):
    """What a node's launcher says."""

    node: str
    incarnation: str
    beat: int
    """Counts its own period."""
    phase: MemberPhase
    session: str = ""
    reason: str = ""
    """Why its ranks failed."""
    for_good: bool = False
    """Starting them again won't help."""


Word = LeaderWord | MemberWord


def words_subject(run: str) -> str:
    """Where launchers speak."""
    return f"hrq.{run}.ranks"


class Silence:
    """Who has not been heard for how many of the listener's own beats."""

    def __init__(self, own: str, limit: int) -> None:
        self._own: Final = own
        self._limit: Final = limit
        self._beat = 0
        self._missed: Final[dict[str, int]] = {}

    def hear(self, name: str) -> None:
        """Somebody spoke."""
        self._missed[name] = 0

    def hear_own(self, beat: int) -> None:
        """The listener heard itself: words get through."""
        if beat > self._beat:
            self._beat = beat
            for name in self._missed:
                self._missed[name] += 1

    def is_silent(self, name: str) -> bool:
        """Whether a name was never heard, or not for too long."""
        return self._missed.get(name, self._limit + 1) > self._limit


class Coordinator:
    """The leading node's part: decides when a session begins and why it ends."""

    def __init__(
        self,
        group: RankGroup,
        incarnation: str,
        *,
        silent_beats: int,
        new_session: Callable[[], tuple[str, int]],
        settings: str = "",
    ) -> None:
        """Args:
        incarnation: of this coordinator; another one starts from the beginning.
        silent_beats: so many beats without a word, and a node is given up.
        new_session: a new id, and the port where its ranks meet.
        settings: digest of what must be the same for all ranks.
        """
        self._group: Final = group
        self._new_session: Final = new_session
        self._silence: Final = Silence(group.node, silent_beats)
        self._words: Final[dict[str, MemberWord]] = {}
        self._joined: Final[dict[str, str]] = {}
        """Node → incarnation of the launcher whose ranks are in the session."""
        self._failed_session = ""
        self._heard_out: set[str] = set()
        self._not_before_s = 0.0
        self.word: LeaderWord = LeaderWord(incarnation=incarnation, phase=GroupPhase.GATHERING, settings=settings)
        self.num_failed = 0
        """Sessions that failed because ranks did."""
        self.for_good = False
        """A rank of the last one that failed said that starting it again won't help."""

    def hear(self, word: MemberWord) -> None:
        """A launcher spoke."""
        self._words[word.node] = word
        self._silence.hear(word.node)
        if word.node == self._group.node:
            self._silence.hear_own(word.beat)

    def decide(self, now_s: float) -> LeaderWord:
        """What holds from now on."""
        match self.word.phase:
            case GroupPhase.GATHERING:
                self._hear_the_others_out()
                if not self.missing() and now_s >= self._not_before_s:
                    session, port = self._new_session()
                    self._joined.clear()
                    self._say(GroupPhase.RUNNING, session=session, port=port)
            case GroupPhase.RUNNING:
                self._watch(now_s)
            case GroupPhase.ENDING:
                if all(self._has_stopped(member.node) for member in self._group.members):
                    self._say(GroupPhase.GATHERING, reason=self.word.reason)
            case GroupPhase.FINISHED:
                pass
        return self.word

    def missing(self) -> list[str]:
        """Nodes that are not ready for a session, each with the reason."""
        found: list[str] = []
        for member in self._group.members:
            word = self._words.get(member.node)
            if word is None or word.phase is MemberPhase.LEFT or self._silence.is_silent(member.node):
                found.append(f"node {member.node}")
            elif word.phase is not MemberPhase.IDLE:
                found.append(f"node {member.node} to end its former ranks")
        return found

    def _watch(self, now_s: float) -> None:
        session, finished = self.word.session, 0
        for member in self._group.members:
            node, word = member.node, self._words[member.node]
            if self._silence.is_silent(node):
                self._fail(f"node {node} is silent: it died, or can't reach the broker", now_s)
                return
            if self._joined.setdefault(node, word.incarnation) != word.incarnation:
                self._fail(f"node {node} was started anew: its former ranks are gone", now_s)
                return
            if word.phase in (MemberPhase.LEAVING, MemberPhase.LEFT):
                self._say(GroupPhase.ENDING, session=session, reason=f"node {node} leaves")
                return
            if word.session == session and word.phase is MemberPhase.FAILED:
                self._failed_session, self._heard_out = session, {node}
                self.num_failed += 1
                self.for_good = word.for_good
                self._fail(f"node {node}: {word.reason}", now_s)
                return
            finished += word.session == session and word.phase is MemberPhase.FINISHED
        if finished == len(self._group.members):
            self._say(GroupPhase.FINISHED, session=session)

    def _hear_the_others_out(self) -> None:
        """Ranks of other nodes that failed in the same session may know the cause where the first one heard only lost them."""
        for node, word in self._words.items():
            if (
                word.phase is MemberPhase.FAILED
                and word.session == self._failed_session
                and node not in self._heard_out
            ):
                self._heard_out.add(node)
                self.for_good = self.for_good or word.for_good
                self._say(GroupPhase.GATHERING, reason=f"{self.word.reason}\nnode {node}: {word.reason}")

    def _has_stopped(self, node: str) -> bool:
        running = (MemberPhase.RUNNING, MemberPhase.LEAVING)
        return self._silence.is_silent(node) or self._words[node].phase not in running

    def _fail(self, reason: str, now_s: float) -> None:
        self._not_before_s = now_s + min(_MOST_DELAY_S, _FIRST_DELAY_S * 2 ** min(self.num_failed, 16))
        self._say(GroupPhase.GATHERING, reason=reason)

    def _say(self, phase: GroupPhase, *, session: str = "", port: int = 0, reason: str = "") -> None:
        self.word = msgspec.structs.replace(self.word, phase=phase, session=session, port=port, reason=reason)


class Order(StrEnum):
    """What a launcher does with its ranks."""

    NOTHING = "nothing"
    START = "start"
    KILL = "kill"
    STOP = "stop"
    """Let each end after its step."""
    LEAVE = "leave"
    """The trainer's work is done everywhere."""


def obey(word: LeaderWord | None, phase: MemberPhase, session: str, *, silent: bool) -> Order:
    """What follows for a node's ranks from the coordinator's last word.

    Args:
        word: None: none was heard.
        phase: the ranks'.
        session: of the ranks; empty without.
        silent: nothing was heard of the leading node for too long, though words get through.
    """
    runs = phase is MemberPhase.RUNNING
    if word is None or silent:
        return Order.KILL if runs else Order.NOTHING
    match word.phase:
        case GroupPhase.GATHERING:
            return Order.NOTHING if phase is MemberPhase.IDLE else Order.KILL
        case GroupPhase.RUNNING:
            if session == word.session:
                return Order.NOTHING
            return Order.START if phase is MemberPhase.IDLE else Order.KILL
        case GroupPhase.ENDING:
            return Order.STOP if runs else Order.NOTHING
        case GroupPhase.FINISHED:
            if phase is MemberPhase.IDLE or (phase is MemberPhase.FINISHED and session == word.session):
                return Order.LEAVE
            return Order.KILL


def rank_environments(group: RankGroup, word: LeaderWord, interface: str) -> list[dict[str, str]]:
    """What each rank of a node finds in its environment, in order: as torchrun says it.

    Args:
        interface: network interface of the node's address; empty: not known.
    """
    whole = {
        "WORLD_SIZE": str(group.world_size),
        "LOCAL_WORLD_SIZE": str(group.num_ranks),
        "GROUP_RANK": str([member.node for member in group.members].index(group.node)),
        "MASTER_ADDR": group.master,
        "MASTER_PORT": str(word.port),
        SESSION_ENV: word.session,
    }
    if interface:
        whole |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    first = group.first_rank
    return [{**whole, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(group.num_ranks)]


def interface_of(addresses: Sequence[str], interfaces: Mapping[str, Sequence[str]]) -> str:
    """The network interface that has one of these addresses; empty where none has.

    Args:
        addresses: what a node's address resolves to.
        interfaces: name → its addresses.
    """
    for name, own in interfaces.items():
        if set(own) & set(addresses):
            return name
    if addresses and all(_is_loopback(address) for address in addresses):  # 127.0.0.2 is there without being listed
        return next((name for name, own in interfaces.items() if any(map(_is_loopback, own))), "")
    return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
