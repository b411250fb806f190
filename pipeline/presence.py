"""Who is there: each worker process keeps a lease on a last-value key, so that one that vanished without a word is known dead.

A process that ends in good order says so; its successor in the same slot takes the lease over. One that is not renewed
belongs to a process that died: killed, its node gone, its batch job over. It must not know what workers do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from pipeline.wall_clock import WallClock
from schemas.ids import encode_token

log = structlog.get_logger("headrace.presence")

PERIOD_S: Final = 3.0
TTL_S: Final = 15.0
"""A lease that was not renewed for so long is over. Nodes' clocks must agree better than that."""
_PREFIX: Final = "presence"
_LEAVE_S: Final = 2.0
_SLURM_JOB: Final = "SLURM_JOB_ID"


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is there, or was."""

    slot: str
    """Unique among living processes; a successor has the same."""
    stages: list[str]
    host: str
    pid: int
    node: str = ""
    """The topology's name of its node; empty: a run on one machine."""
    slurm_job: str = ""
    since_unix_s: float
    renewed_unix_s: float
    ttl_s: float = TTL_S
    left: bool = False
    """It ended in good order."""

    @property
    def worker(self) -> str:
        """As its reports name it."""
        return f"{self.host}:{self.pid}"

    @property
    def place(self) -> str:
        """The node by its name, else the host."""
        return self.node or self.host


class PresenceLease:
    """This process's lease: `keep` it beside the work, `leave` at a good end."""

    def __init__(
        self,
        broker: Broker,
        slot: str,
        stages: Sequence[str],
        *,
        now: WallClock,
        node: str = "",
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._broker: Final = broker
        self._key: Final = f"{_PREFIX}.{encode_token(slot)}"
        self._now: Final = now
        self._presence: Final = Presence(
            slot=slot,
            stages=list(stages),
            host=socket.gethostname(),
            pid=os.getpid(),
            node=node,
            slurm_job=environ.get(_SLURM_JOB, ""),
            since_unix_s=now(),
            renewed_unix_s=now(),
        )

    async def keep(self) -> None:
        """Renew it, for ever. A broker that is away only makes it old."""
        while True:
            try:
                await self.renew()
            except BrokerError as error:
                log.debug("the presence lease was not renewed", error=str(error))
            await anyio.sleep(PERIOD_S)

    async def renew(self) -> None:
        """Say that this process is there.

        Raises:
            BrokerError: it could not be said.
        """
        await self._say(left=False)

    async def leave(self) -> None:
        """Say that this process ends in good order."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_LEAVE_S):
            try:
                await self._say(left=True)
            except BrokerError as error:
                log.debug("an end in good order could not be said", error=str(error))

    async def _say(self, *, left: bool) -> None:
        presence = msgspec.structs.replace(self._presence, renewed_unix_s=self._now(), left=left)
        await self._broker.save_state(self._key, msgspec.msgpack.encode(presence))


async def roll_call(broker: Broker) -> list[Presence]:
    """Every process that did not end in good order, living or dead."""
    return [one for one in await ever_present(broker) if not one.left]


async def ever_present(broker: Broker) -> list[Presence]:
    """Every process that is on the roll, those that ended in good order included."""
    found = await broker.list_state(_PREFIX)
    presences = [msgspec.msgpack.decode(data, type=Presence) for data, _ in found.values()]
    return sorted(presences, key=lambda one: (one.place, one.slot))


async def forget_missing(broker: Broker, *, now: float) -> None:
    """Strike the dead off the roll: a run that starts anew counts anew. For whoever may do everything with the run."""
    for key, (data, _) in (await broker.list_state(_PREFIX)).items():
        presence = msgspec.msgpack.decode(data, type=Presence)
        if presence.left or missing([presence], heard=frozenset(), now=now):
            await broker.delete_state(key)


def missing(presences: Sequence[Presence], *, heard: frozenset[str], now: float) -> list[Presence]:
    """Those that died: their lease is over, and nobody hears their reports. Pure.

    Args:
        presences: of a roll call.
        heard: workers whose reports came just now.
        now: the wall clock, seconds since 1970.
    """
    return [one for one in presences if now - one.renewed_unix_s > one.ttl_s and one.worker not in heard]


def dead_nodes(presences: Sequence[Presence], dead: Sequence[Presence]) -> list[str]:
    """Nodes, by name, of which no process is left; hosts, where no topology names them. Pure."""
    living = {one.place for one in presences if one not in dead}
    return sorted({one.place for one in dead} - living)


def obituary(dead: Presence, *, now: float, job_states: Mapping[str, str] = {}) -> str:
    """One dead process in words.

    Args:
        now: the wall clock, seconds since 1970.
        job_states: Slurm job → what Slurm says of it. A job that COMPLETED is as dead as one that failed: no process of it said an end.
    """
    state = job_states.get(dead.slurm_job, "")
    job = f", Slurm job {dead.slurm_job}{f' {state}' if state else ''}" if dead.slurm_job else ""
    stages = " + ".join(dead.stages)
    where = f"node {dead.node} ({dead.host}" if dead.node else f"{dead.host} ("
    pid = f", pid {dead.pid}" if dead.node else f"pid {dead.pid}"
    return f"{stages} on {where}{pid}{job}): not seen for {now - dead.renewed_unix_s:.0f} s, no word of an end"
