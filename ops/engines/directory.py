"""The gateway's end of engine announcements: who is heard joins the router, who falls silent leaves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import anyio
import anyio.abc
import msgspec
import structlog

from broker.api import Broker
from pipeline.log import RunLog
from schemas.config import EngineKind
from schemas.messages.engines import EngineAnnouncement, engines_pattern
from schemas.messages.training import WeightsPublished
from schemas.topics import WEIGHTS_PUBLISHED
from stages.ports import EngineError, InferenceEngine
from stages.routing.router import Router

log = structlog.get_logger("headrace.gateway")

_SWEEP_S: Final = 1.0

OpenClient = Callable[[EngineKind, str, str], AbstractAsyncContextManager[InferenceEngine]]
"""Kind, name and URL of a server."""


class EngineDirectory:
    """Keeps a router's members in step with what engines announce."""

    def __init__(self, broker: Broker, router: Router, open_client: OpenClient) -> None:
        self._broker: Final = broker
        self._router: Final = router
        self._open: Final = open_client
        self._clients: Final[dict[str, _Client]] = {}
        self.heard: Final = anyio.Event()
        """Set once an engine takes requests."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen, for ever; started once it does and knows the newest published version."""
        sequence = await self._read_versions()
        async with (
            anyio.create_task_group() as tasks,
            self._broker.listen(engines_pattern(self._broker.run)) as announcements,
        ):
            tasks.start_soon(self._router.run)
            tasks.start_soon(self._sweep)
            tasks.start_soon(self._follow_versions, sequence)
            task_status.started()
            async for _subject, data in announcements:
                self.hear(msgspec.msgpack.decode(data, type=EngineAnnouncement), tasks)

    def hear(self, announced: EngineAnnouncement, tasks: anyio.abc.TaskGroup) -> None:
        """One announcement: a server at a new address gets a client of its own."""
        known = self._clients.get(announced.name)
        if known is not None and (known.incarnation, known.url) != (announced.incarnation, announced.url):
            self._drop(announced.name, "its server started anew")
            known = None
        if known is None:
            if announced.url:
                client = _Client(announced)
                self._clients[announced.name] = client
                tasks.start_soon(self._keep, client)
            else:
                self._router.away(announced)
            return
        known.announced = announced
        self._router.hear(announced)
        self._note()

    def _note(self) -> None:
        if not self.heard.is_set() and any(one.admitted for one in self._router.members):
            self.heard.set()

    def _drop(self, name: str, reason: str) -> None:
        client = self._clients.pop(name, None)
        if client is not None:
            self._router.leave(name, reason)
            client.left.set()

    async def _keep(self, client: _Client) -> None:
        """An open client to a server, for as long as that is a member."""
        first = client.announced
        try:
            async with self._open(EngineKind(first.kind), first.name, first.url) as engine:
                if not client.left.is_set():
                    self._router.join(engine, client.announced)
                    self._note()
                await client.left.wait()
        except EngineError as error:  # it went away again: its next announcement tells
            log.warning("no client to an engine", engine=first.name, url=first.url, error=str(error))
            if self._clients.get(first.name) is client:
                self._drop(first.name, str(error))

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(_SWEEP_S)
            for name in self._router.forget_silent():
                self._drop(name, "silent")

    async def _read_versions(self) -> int:
        """The newest published version, before anybody may join; where it stands."""
        sequence = 0
        async with RunLog(self._broker).read([WEIGHTS_PUBLISHED], follow=False) as entries:
            async for entry in entries:
                sequence = entry.sequence
                self._published(entry.message)
        return sequence

    async def _follow_versions(self, after: int) -> None:
        async with RunLog(self._broker).read([WEIGHTS_PUBLISHED], after_sequence=after) as entries:
            async for entry in entries:
                self._published(entry.message)

    def _published(self, message: msgspec.Struct) -> None:
        if isinstance(message, WeightsPublished):
            self._router.publish(message.version)


class _Client:
    def __init__(self, announced: EngineAnnouncement) -> None:
        self.announced = announced
        self.url: Final = announced.url
        self.incarnation: Final = announced.incarnation
        self.left: Final = anyio.Event()
