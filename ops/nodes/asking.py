"""What a person asks of a run's nodes, and what nodes say of themselves, through the broker.

headrace scale | down ──hrq.<run>.node.<name>──▶ the node's supervisor
a node that runs       ──▶ last value `node.<name>`        what it runs; or that it left
headrace scale         ──▶ last value `scale.<name>`       obeyed again at the node's next start
the run's end          ──▶ last value `run.over`           every node leaves
"""

from __future__ import annotations

import uuid
from typing import Final, Literal

import msgspec

from broker.api import Broker
from broker.errors import BrokerError
from schemas.errors import ConfigError

_NODE: Final = "node"
_SCALE: Final = "scale"
OVER_KEY: Final = "run.over"
ENDED_KEY: Final = "run.ended"
ARENA_KEY: Final = "run.arena"
"""Where the run's local Arena is."""
TRAINED_KEY: Final = "run.trained"
"""The start of the run whose trainer has done its work."""
SECRETS_KEY: Final = "run.secrets"
"""Checksum of the keys that all nodes must share."""
NODES_KEY: Final = "run.nodes"
"""Names of all nodes of the topology, as the control node has it."""
_ANSWER_S: Final = 30.0
_PING_S: Final = 3.0


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it says of itself."""

    node: str
    address: str = ""
    control: bool = False
    broker: bool = False
    counts: dict[str, int] = {}
    """Processes of each scalable stage that the node has."""
    gone: bool = False
    """It left, or died."""


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a node."""

    action: Literal["ping", "scale", "stop"]
    stage: str = ""
    count: int = 0


class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    state: NodeState
    error: str = ""


class NodeRefusedError(ConfigError):
    """The node says why."""


class NodeSilentError(ConfigError):
    """Nobody answers for the node."""


def node_subject(run: str, node: str) -> str:
    """Where a node's supervisor answers."""
    return f"hrq.{run}.node.{node}"


async def ask_node(broker: Broker, node: str, request: NodeRequest) -> NodeState:
    """Ask a node's supervisor.

    Raises:
        NodeRefusedError, NodeSilentError.
    """
    deadline_s = _PING_S if request.action == "ping" else _ANSWER_S
    try:
        data = await broker.request(
            node_subject(broker.run, node), msgspec.msgpack.encode(request), deadline_s=deadline_s
        )
    except BrokerError as error:
        raise NodeSilentError(f"node {node} of run {broker.run} does not answer: is it up? ({error})") from error
    reply = msgspec.msgpack.decode(data, type=NodeReply)
    if reply.error:
        raise NodeRefusedError(f"node {node}: {reply.error}")
    return reply.state


async def answers(broker: Broker, node: str) -> bool:
    """Whether a node's supervisor is there."""
    try:
        await ask_node(broker, node, NodeRequest(action="ping"))
    except NodeSilentError:
        return False
    return True


async def nodes_of(broker: Broker) -> dict[str, NodeState]:
    """The nodes that came and did not leave in good order."""
    return {name: state for name, state in (await all_nodes(broker)).items() if not state.gone}


async def all_nodes(broker: Broker) -> dict[str, NodeState]:
    """Every node that ever came, by name."""
    states = [msgspec.msgpack.decode(data, type=NodeState) for data, _ in (await broker.list_state(_NODE)).values()]
    return {state.node: state for state in sorted(states, key=lambda state: state.node)}


async def say_here(broker: Broker, state: NodeState) -> None:
    """Keep what a node runs."""
    await broker.save_state(f"{_NODE}.{state.node}", msgspec.msgpack.encode(state))


async def say_gone(broker: Broker, node: str) -> None:
    """Say of a node that it left. Nothing is deleted: that takes a right which nodes that only roll out don't have."""
    await say_here(broker, NodeState(node=node, gone=True))


async def scales_of(broker: Broker, node: str) -> dict[str, int]:
    """How many processes of which stages a person wants on a node, beside what its topology says."""
    found = await broker.load_state(f"{_SCALE}.{node}")
    return msgspec.msgpack.decode(found[0], type=dict[str, int]) if found else {}


async def keep_scales(broker: Broker, node: str, counts: dict[str, int]) -> None:
    """Remember that for the node's next start."""
    await broker.save_state(f"{_SCALE}.{node}", msgspec.msgpack.encode(counts))


async def say_over(broker: Broker) -> None:
    """Every node stops its workers and leaves; one with a NATS server goes on serving."""
    await broker.save_state(OVER_KEY, uuid.uuid4().bytes)


async def say_ended(broker: Broker) -> None:
    """Nobody needs the broker any more."""
    await broker.save_state(ENDED_KEY, uuid.uuid4().bytes)


async def state_bytes(broker: Broker, key: str) -> bytes:
    """A last value, or nothing."""
    found = await broker.load_state(key)
    return bytes(found[0]) if found else b""
