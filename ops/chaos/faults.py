"""Plays single faults: begins one, lets it last, takes it back. What the run makes of it is not looked at here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.connect import open_admin
from broker.errors import BrokerError, TopologyError
from broker.topology import RunLimits, run_topology
from ops.chaos.plan import Fault, FaultKind
from ops.chaos.servers import BrokerUnderChaos
from ops.chaos.world import RunUnderChaos

log = structlog.get_logger("headrace.chaos")

_APPEAR_S: Final = 60.0
"""How long a process may take to be there (again)."""
_ADMIN_S: Final = 30.0
_JUMP_S: Final = 7200.0
_OLD_MESSAGES: Final = 20
_FULL_MARGIN_BYTES: Final = 512


class FaultPlayer:
    """Plays faults in one world."""

    def __init__(
        self,
        world: RunUnderChaos,
        nodes: BrokerUnderChaos,
        broker: Broker,
        limits: RunLimits,
        clock_file: Path,
        *,
        moves: Callable[[float], Awaitable[float | None]],
    ) -> None:
        """Args:
        moves: seconds from a time to the first work after it; None: none came.
        """
        self._world: Final = world
        self._nodes: Final = nodes
        self._broker: Final = broker
        """Past the proxies."""
        self._limits: Final = limits
        self._clock_file: Final = clock_file
        self._moves: Final = moves
        self.without_node_s: Final[list[float]] = []
        """By when work went on after one of three nodes was killed."""
        self.doubled: Final[list[str]] = []
        """Subjects under which a second message was let in."""

    async def play(self, fault: Fault) -> None:
        """One fault from its beginning to its end."""
        every = range(self._nodes.num_nodes)
        node = int(fault.amount * self._nodes.num_nodes)
        match fault.kind:
            case FaultKind.KILL | FaultKind.STOP | FaultKind.RESTART:
                await self._strike(fault)
            case FaultKind.SECOND_WORKER:
                await self._second_worker(fault)
            case FaultKind.BROKER_KILLED:
                await self._killed(fault, *every)
            case FaultKind.BROKER_STOPPED:
                await self._stopped(fault, *every)
            case FaultKind.NODE_KILLED:
                await self._node_killed(fault, node)
            case FaultKind.NODE_STOPPED:
                await self._stopped(fault, node)
            case FaultKind.STORE_FULL:
                await self._store_full(fault)
            case FaultKind.DISK_FULL:
                await self._disk_full(fault)
            case FaultKind.CLOCK_JUMP:
                self._clock_file.write_text(f"{(fault.amount * 2 - 1) * _JUMP_S:.3f}", encoding="ascii")
            case FaultKind.WINDOW_PASSED:
                await self._publish_old_messages()
            case _:
                await self._bad_weather(fault)

    async def _strike(self, fault: Fault) -> None:
        if fault.target == "supervisor":
            await self._strike_supervisor(fault)
            return
        pid = await self._wait_for(fault.target)
        with suppress(ProcessLookupError):  # it died by itself meanwhile: what comes after it is as good
            match fault.kind:
                case FaultKind.KILL:
                    os.kill(pid, signal.SIGKILL)
                case FaultKind.RESTART:
                    os.kill(pid, signal.SIGTERM)
                case _:
                    os.kill(pid, signal.SIGSTOP)
                    await anyio.sleep(fault.duration_s)
                    os.kill(pid, signal.SIGCONT)

    async def _strike_supervisor(self, fault: Fault) -> None:
        await self._wait_for("trainer")  # a run that stands
        match fault.kind:
            case FaultKind.KILL:
                await self._world.kill_supervisor()
                await self._world.start()
            case FaultKind.RESTART:
                await self._world.interrupt()
                await self._world.start()
            case _:
                pid = self._world.pid
                os.kill(pid, signal.SIGSTOP)
                await anyio.sleep(fault.duration_s)
                os.kill(pid, signal.SIGCONT)

    async def _wait_for(self, kind: str) -> int:
        """A process of a kind, as soon as there is one.

        Raises:
            TimeoutError: there is none.
        """
        with anyio.fail_after(_APPEAR_S):
            while True:
                await self._world.mend()
                found = self._world.pids(kind)
                if found:
                    return found[0]
                await anyio.sleep(0.02)

    async def _second_worker(self, fault: Fault) -> None:
        await self._wait_for(fault.target)
        worker = await self._world.join(fault.target)
        await anyio.sleep(fault.duration_s)
        await self._world.end_extra(worker)

    async def _killed(self, fault: Fault, *nodes: int) -> None:
        await self._nodes.kill(*nodes)
        await anyio.sleep(fault.duration_s)
        await self._nodes.start(*nodes)

    async def _node_killed(self, fault: Fault, node: int) -> None:
        """One of three: the run goes on without it (where it led, others elect a leader first), then it returns.

        Raises:
            TimeoutError: the run does not go on without it.
        """
        await self._nodes.kill(node)
        killed_unix_s = time.time()
        await anyio.sleep(fault.duration_s)
        moving_s = await self._moves(killed_unix_s + fault.duration_s)
        await self._nodes.start(node)
        if moving_s is None:
            raise TimeoutError(f"no work went on while node {node} was away")
        self.without_node_s.append(moving_s + fault.duration_s)

    async def _stopped(self, fault: Fault, *nodes: int) -> None:
        self._nodes.pause(*nodes)
        await anyio.sleep(fault.duration_s)
        self._nodes.go_on(*nodes)

    async def _bad_weather(self, fault: Fault) -> None:
        weather = self._nodes.weather
        match fault.kind:
            case FaultKind.LINK_CUT:
                self._reset_links()
            case FaultKind.LINK_REFUSED:
                weather.refuses = True
                self._reset_links()
            case FaultKind.LINK_DELAYED:
                weather.delay_s = 0.02 + 0.2 * fault.amount
            case FaultKind.LINK_HALF_OPEN:
                weather.silent = True
            case FaultKind.ACKS_LOST:
                weather.loses_acks = True
            case FaultKind.DELIVERED_TWICE:
                weather.delivers_twice = True
            case _:
                weather.delivers_late_s = 4.0
        await anyio.sleep(fault.duration_s)
        was_silent = weather.silent
        weather.refuses = weather.silent = weather.loses_acks = weather.delivers_twice = False
        weather.delay_s = weather.delivers_late_s = 0.0
        if was_silent:
            self._reset_links()  # bytes that went nowhere can't be made up for on the same connection

    def _reset_links(self) -> None:
        for proxy in self._nodes.proxies:
            proxy.reset()

    async def _store_full(self, fault: Fault) -> None:
        size = (await self._broker.log_status()).size_bytes
        await self._limit_log(size + _FULL_MARGIN_BYTES)
        try:
            await anyio.sleep(fault.duration_s)
        finally:
            with anyio.CancelScope(shield=True):
                await self._limit_log(self._limits.log_max_bytes)

    async def _limit_log(self, max_bytes: int) -> None:
        """Change the log's limit; tried again while a cluster agrees on who answers.

        Raises:
            BrokerError, TimeoutError: it can't be changed.
        """

        async def change() -> None:
            limits = msgspec.structs.replace(self._limits, log_max_bytes=max_bytes)
            async with open_admin(self._nodes.direct_url, self._nodes.settings("chaos")) as admin:
                await admin.apply(run_topology(self._broker.run, limits), update=True)

        await _patiently(change)

    async def _disk_full(self, fault: Fault) -> None:
        """On the first node; a node whose disk was full is started again, as an operator would."""
        self._nodes.fill_disk()
        try:
            await anyio.sleep(fault.duration_s)
        finally:
            self._nodes.free_disk()
        await self._nodes.restart(0)

    async def _publish_old_messages(self) -> None:
        """What stands for longer than the duplicate window is published again: the same bytes, then others."""
        before_s = time.time() - self._limits.duplicate_window_s - 1.0
        old: list[tuple[str, bytes]] = []
        async with self._broker.read([f"hr.{self._broker.run}.>"], follow=False) as records:
            async for record in records:
                if record.unix_time_s >= before_s or len(old) >= _OLD_MESSAGES:
                    break
                old.append((record.subject, record.data))
        if not old:
            await anyio.sleep(self._limits.duplicate_window_s / 2)
            await self._publish_old_messages()
            return
        for subject, data in old:
            same = await self._broker.publish(subject, data)
            other = await self._broker.publish(subject, data + b"\xc0")
            if same.created or other.created or other.standing != data:
                self.doubled.append(subject)


async def _patiently(act: Callable[[], Awaitable[None]]) -> None:
    with anyio.fail_after(_ADMIN_S):
        while True:
            try:
                await act()
            except TopologyError:
                raise
            except BrokerError as error:
                log.debug("the broker is asked again", error=str(error))
                await anyio.sleep(0.2)
            else:
                return
