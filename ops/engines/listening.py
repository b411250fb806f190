"""What a run's engines say of themselves, for people who look."""

from __future__ import annotations

from typing import Final

import anyio
import msgspec

from broker.api import Broker
from schemas.messages.engines import EngineAnnouncement, EngineState, engines_pattern

LISTEN_S: Final = 2.5
"""Engines announce themselves every second."""

STYLES: Final = {
    EngineState.SERVING: "green",
    EngineState.QUARANTINED: "bold red",
    EngineState.STARTING: "yellow",
    EngineState.LOADING: "yellow",
    EngineState.DRAINING: "dim",
}
"""How a state is shown."""


async def heard_engines(broker: Broker, *, listen_s: float = LISTEN_S) -> list[EngineAnnouncement]:
    """The newest announcement of each engine that is heard within `listen_s`, in order of their names."""
    heard: dict[str, EngineAnnouncement] = {}
    async with broker.listen(engines_pattern(broker.run)) as announcements:
        with anyio.move_on_after(listen_s):
            async for _subject, data in announcements:
                told = msgspec.msgpack.decode(data, type=EngineAnnouncement)
                heard[told.name] = told
    return [heard[name] for name in sorted(heard)]


def load_line(engines: list[EngineAnnouncement]) -> str:
    """All engines on one line; empty where there is none."""
    if not engines:
        return ""
    serving = [one for one in engines if one.state is EngineState.SERVING]
    running, capacity = sum(one.running for one in serving), sum(one.capacity for one in serving)
    waiting = sum(one.waiting for one in serving)
    versions = sorted({one.version for one in serving})
    text = f"{len(serving)} of {len(engines)} serving"
    if versions:
        text += f" version {versions[0]}" + (f" to {versions[-1]}" if versions[-1] > versions[0] else "")
    return f"{text}, {running} of {capacity} requests" + (f" and {waiting} queued" if waiting else "")
