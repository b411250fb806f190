"""Which faults happen, in which order: a pure function of a seed.

A deck holds every kind with every target once; decks follow each other until there are enough faults. Kinds take turns
within a deck, so that few faults already are of many kinds.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from schemas.errors import ConfigError


class FaultKind(StrEnum):
    """What is done to a run."""

    KILL = "kill"
    """kill -9 of a process; its supervisor, or for the supervisor the same command, starts it again."""
    STOP = "stop"
    """SIGSTOP, a pause, SIGCONT."""
    RESTART = "restart"
    """SIGTERM to a process (Ctrl-C to the supervisor): it ends in good order and is started again."""
    SECOND_WORKER = "second_worker"
    """Another worker of a stage joins for a while and is killed."""
    BROKER_KILLED = "broker_killed"
    """kill -9 of every broker node at once, started again after a moment."""
    BROKER_STOPPED = "broker_stopped"
    """SIGSTOP of every broker node."""
    NODE_KILLED = "node_killed"
    """kill -9 of one of three nodes, started again after a while."""
    NODE_STOPPED = "node_stopped"
    """SIGSTOP of one of three nodes."""
    LINK_CUT = "link_cut"
    """Every connection to the broker is reset."""
    LINK_REFUSED = "link_refused"
    """Every connection is reset and none can be made for a while."""
    LINK_DELAYED = "link_delayed"
    """Everything takes longer for a while."""
    LINK_HALF_OPEN = "link_half_open"
    """Connections stand, and nothing comes through them, for longer than a heartbeat."""
    ACKS_LOST = "acks_lost"
    """Acknowledgements do not reach the broker: it delivers again later."""
    DELIVERED_TWICE = "delivered_twice"
    """What a durable hands out arrives twice."""
    DELIVERED_LATE = "delivered_late"
    """What a durable hands out arrives seconds later, in any order."""
    STORE_FULL = "store_full"
    """The log's limit is lowered to what it holds: every new message is refused, then room comes back."""
    DISK_FULL = "disk_full"
    """The file system under a broker node has no byte left; later there is room, and the node is restarted in good order."""
    CLOCK_JUMP = "clock_jump"
    """The wall clock of all workers jumps by up to two hours, either way."""
    WINDOW_PASSED = "window_passed"
    """Messages that are older than the broker's duplicate window are published again, the same and other bytes."""


PROCESSES: Final = (
    "supervisor",
    "sampling",
    "fan_out",
    "arena_launch",
    "rewards",
    "assembly",
    "weights",
    "gateway",
    "trainer",
    "arena",
    "arena_pool",
    "agent",
)
"""Kinds of processes that a run has."""
JOINING: Final = ("sampling", "fan_out", "arena_launch", "rewards", "assembly", "weights", "trainer")
"""Stages of which a second worker may join at any time. Gateways have a port each: a second one needs a config of its own."""
ON_NODES: Final = frozenset({FaultKind.NODE_KILLED, FaultKind.NODE_STOPPED})

_SUPERVISED: Final = frozenset({FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART})
_DURATIONS_S: Final[Mapping[FaultKind, tuple[float, float]]] = {
    FaultKind.STOP: (0.2, 2.0),
    FaultKind.SECOND_WORKER: (1.5, 3.0),
    FaultKind.BROKER_KILLED: (0.0, 1.0),
    FaultKind.BROKER_STOPPED: (0.2, 1.5),
    FaultKind.NODE_KILLED: (0.5, 2.0),
    FaultKind.NODE_STOPPED: (0.2, 1.5),
    FaultKind.LINK_REFUSED: (0.3, 1.5),
    FaultKind.LINK_DELAYED: (1.0, 2.0),
    FaultKind.LINK_HALF_OPEN: (0.5, 2.5),
    FaultKind.ACKS_LOST: (0.5, 1.5),
    FaultKind.DELIVERED_TWICE: (1.0, 2.0),
    FaultKind.DELIVERED_LATE: (1.0, 2.0),
    FaultKind.STORE_FULL: (0.5, 1.5),
    FaultKind.DISK_FULL: (0.3, 1.0),
}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault."""

    number: int
    kind: FaultKind
    target: str = ""
    """A process, or a stage; empty where the kind says it all."""
    duration_s: float = 0.0
    """How long it lasts."""
    amount: float = 0.0
    """0 … 1: which node, how far a clock jumps; drawn with the plan, so that a seed says it all."""
    waits: bool = True
    """False: the next fault comes before the run has recovered from this one. Faults of one kind alone never overlap."""

    @property
    def name(self) -> str:
        """Kind and target, as results count it."""
        return f"{self.kind.value}:{self.target}" if self.target else self.kind.value


def parse_kinds(names: Collection[str]) -> frozenset[FaultKind]:
    """The kinds of these names; all of them where there are none.

    Raises:
        ConfigError: a name that is no kind.
    """
    allowed = {kind.value: kind for kind in FaultKind}
    for name in names:
        if name not in allowed:
            raise ConfigError(f"--only {name}: expected one of {', '.join(sorted(allowed))}")
    return frozenset(allowed[name] for name in names) or frozenset(FaultKind)


def plan(
    seed: int, num_faults: int, *, kinds: Collection[FaultKind], processes: Sequence[str] = PROCESSES
) -> list[Fault]:
    """The faults of a seed.

    Args:
        seed: any number; the same one gives the same faults.
        num_faults: how many.
        kinds: those that this world can play.
        processes: targets that this world has.
    """
    chance = random.Random(seed)  # noqa: S311 - a reproducible plan, nothing secret
    cards: list[tuple[FaultKind, str]] = []
    while len(cards) < num_faults:
        cards += _deck(chance, kinds, processes)
    return [
        _fault(chance, number, kind, target, alone=len(kinds) == 1)
        for number, (kind, target) in enumerate(cards[:num_faults])
    ]


def _deck(chance: random.Random, kinds: Collection[FaultKind], processes: Sequence[str]) -> list[tuple[FaultKind, str]]:
    piles: list[list[tuple[FaultKind, str]]] = []
    for kind in sorted(kinds):
        targets = [""]
        if kind in _SUPERVISED:
            targets = list(processes)
        elif kind is FaultKind.SECOND_WORKER:
            targets = [stage for stage in JOINING if stage in processes]
        chance.shuffle(targets)
        piles.append([(kind, target) for target in targets])
    deck: list[tuple[FaultKind, str]] = []
    while piles:
        chance.shuffle(piles)
        deck += [pile.pop() for pile in piles]
        piles = [pile for pile in piles if pile]
    return deck


def _fault(chance: random.Random, number: int, kind: FaultKind, target: str, *, alone: bool) -> Fault:
    low, high = _DURATIONS_S.get(kind, (0.0, 0.0))
    return Fault(
        number=number,
        kind=kind,
        target=target,
        duration_s=round(chance.uniform(low, high), 3),
        amount=chance.random(),
        waits=chance.random() >= 0.25 or alone,
    )
