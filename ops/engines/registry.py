"""Servers that a person adds to a run: asked of whoever supervises it, and kept with the run, so that a restart finds them again.

headrace engine register URL ──hrq.<run>.engines──▶ supervisor ──▶ a worker process that looks after the server
                                                        └──▶ last value `engines.<name>`
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from broker.api import Broker
from broker.errors import NotConnectedError
from ops.engines.plan import EnginePlan
from schemas.errors import ConfigError

_STATE_PREFIX: Final = "engines"
_ANSWER_S: Final = 15.0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asks."""

    action: Literal["register", "deregister"]
    name: str = ""
    kind: str = ""
    """Empty: the run's."""
    url: str = ""


class EngineReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    name: str = ""
    error: str = ""


class EngineRequestError(ConfigError):
    """It was refused; the text says why and what to do."""


def registry_subject(run: str) -> str:
    """Where a run's supervisor answers."""
    return f"hrq.{run}.engines"


async def ask_registry(broker: Broker, request: EngineRequest) -> str:
    """Ask a run's supervisor; the engine's name.

    Raises:
        EngineRequestError: it refuses, or the run has none.
    """
    try:
        data = await broker.request(registry_subject(broker.run), msgspec.msgpack.encode(request), deadline_s=_ANSWER_S)
    except NotConnectedError as error:
        raise EngineRequestError(
            f"run {broker.run}: no `headrace run` answers. Is it running, with engine.kind vllm or sglang? Where workers are "
            "started by hand, start one more: headrace worker engine --url URL --run-dir DIR"
        ) from error
    reply = msgspec.msgpack.decode(data, type=EngineReply)
    if reply.error:
        raise EngineRequestError(reply.error)
    return reply.name


async def registered(broker: Broker) -> list[EnginePlan]:
    """The servers that were added, in order of their names."""
    found = await broker.list_state(_STATE_PREFIX)
    return [msgspec.msgpack.decode(data, type=EnginePlan) for _, (data, _) in sorted(found.items())]


async def keep(broker: Broker, plan: EnginePlan) -> None:
    """Remember a server."""
    await broker.save_state(f"{_STATE_PREFIX}.{plan.name}", msgspec.msgpack.encode(plan))


async def forget(broker: Broker, name: str) -> bool:
    """Forget it; whether it was known."""
    if await broker.load_state(f"{_STATE_PREFIX}.{name}") is None:
        return False
    await broker.delete_state(f"{_STATE_PREFIX}.{name}")
    return True
