"""The run's other gateways: alive as long as they are heard, reached over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import anyio
import msgspec

from broker.api import Broker
from pipeline.metrics import WorkerReport, report_subject
from stages.clients.forwarding import HttpForwarder
from stages.ports import ForwardedAnswer

NAME_LABEL: Final = "gateway"
URL_LABEL: Final = "url"
SILENT_S: Final = 5.0
"""A gateway that was not heard for this long is gone."""
FIRST_S: Final = 2.0
"""Whoever begins to listen has heard all living gateways after this: they report every second."""


class LivePeers:
    """`Peers` of a gateway, from the reports that all gateways announce every second."""

    def __init__(
        self,
        broker: Broker,
        forwarder: HttpForwarder,
        *,
        now: Callable[[], float] = anyio.current_time,
        first_s: float = FIRST_S,
    ) -> None:
        self._broker: Final = broker
        self._forwarder: Final = forwarder
        self._now: Final = now
        self._first_s: Final = first_s
        self._heard: Final[dict[str, tuple[str, float]]] = {}
        """name → address, when it was last heard."""
        self._complete: Final = anyio.Event()

    async def listen(self) -> None:
        """Hear the gateways, for ever."""
        async with (
            self._broker.listen(report_subject(self._broker.run, "gateway")) as announcements,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._hear_all)
            async for _subject, data in announcements:
                self.hear(msgspec.msgpack.decode(data, type=WorkerReport))

    def hear(self, report: WorkerReport) -> None:
        """One report."""
        name, url = report.labels.get(NAME_LABEL), report.labels.get(URL_LABEL)
        if name and url:
            self._heard[name] = (url, self._now())
            for gone in [one for one, (_, when) in self._heard.items() if when < self._now() - SILENT_S]:
                del self._heard[gone]

    async def _hear_all(self) -> None:
        await anyio.sleep(self._first_s)
        self._complete.set()

    async def address(self, gateway: str) -> str | None:
        """Where a gateway is; one that was not heard yet is given the time in which it would be."""
        if gateway not in self._heard:
            await self._complete.wait()
        url, when = self._heard.get(gateway, ("", 0.0))
        return url if url and when >= self._now() - SILENT_S else None

    async def forward(self, base_url: str, target: str, headers: Mapping[str, str], body: bytes) -> ForwardedAnswer:
        return await self._forwarder.forward(base_url, target, headers, body)
