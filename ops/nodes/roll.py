"""Which nodes of a run are there now: each known one is asked, so that no clock decides who lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from ops.nodes.asking import NODES_KEY, NodeState, all_nodes, answers, nodes_of, state_bytes

log = structlog.get_logger("headrace.node")

_PERIOD_S: Final = 2.0
UNANSWERED: Final = "its supervisor does not answer, and it took no leave"


class NodePresence(StrEnum):
    """Where a node of the topology stands."""

    UP = "up"
    LEFT = "left"
    """It took leave: it was told to, or the run was over."""
    GONE = "gone"
    """It came, took no leave, and does not answer."""
    AWAITED = "not here"
    """It never came."""


class NodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a run now."""

    node: str
    address: str = ""
    presence: NodePresence


async def say_nodes(broker: Broker, names: Sequence[str]) -> None:
    """Tell which nodes the topology has."""
    await broker.save_state(NODES_KEY, msgspec.msgpack.encode(list(names)))


async def node_lines(broker: Broker, *, is_running: bool = True) -> list[NodeLine]:
    """Every node that the topology has or that ever came, in the topology's order; nothing of a run on one machine.

    Args:
        is_running: False: nobody is asked, since nobody is there.
    """
    told = await state_bytes(broker, NODES_KEY)
    if not told:
        return []
    names = msgspec.msgpack.decode(told, type=list[str])
    known = await all_nodes(broker)
    living = await _living(broker, known) if is_running else frozenset[str]()
    return [
        NodeLine(
            node=name,
            address=known[name].address if name in known else "",
            presence=_presence(known.get(name), is_living=name in living),
        )
        for name in [*names, *(name for name in known if name not in names)]
    ]


def _presence(state: NodeState | None, *, is_living: bool) -> NodePresence:
    if state is None:
        return NodePresence.AWAITED
    if state.gone:
        return NodePresence.LEFT
    return NodePresence.UP if is_living else NodePresence.GONE


async def _living(broker: Broker, known: Mapping[str, NodeState]) -> frozenset[str]:
    found: set[str] = set()
    async with anyio.create_task_group() as tasks:

        async def ask(name: str) -> None:
            if await answers(broker, name):
                found.add(name)

        for name, state in known.items():
            if not state.gone:
                tasks.start_soon(ask, name)
    return frozenset(found)


class NodeCalls:
    """Asks the nodes now and then, and knows which have not answered for too long."""

    def __init__(self, broker: Broker, *, silent_after_s: float) -> None:
        self._broker: Final = broker
        self._silent_after_s: Final = silent_after_s
        self._since_s: Final[dict[str, float]] = {}
        """Node → since when it has not answered."""

    async def run(self) -> None:
        """For ever. A broker that is away ends nobody."""
        while True:
            try:
                known = await nodes_of(self._broker)
                living = await _living(self._broker, known)
                if known and not living:  # not even the one that asks: words don't get through
                    self._since_s.clear()
                else:
                    self._note(set(known) - living)
            except BrokerError as error:
                log.debug("the nodes can't be asked", error=str(error))
                self._since_s.clear()
            await anyio.sleep(_PERIOD_S)

    def gone(self) -> list[str]:
        """Nodes that came, took no leave, and have not answered for too long."""
        now_s = anyio.current_time()
        return sorted(name for name, since_s in self._since_s.items() if now_s - since_s > self._silent_after_s)

    def _note(self, silent: set[str]) -> None:
        now_s = anyio.current_time()
        for name in [name for name in self._since_s if name not in silent]:
            del self._since_s[name]
        for name in silent:
            self._since_s.setdefault(name, now_s)
