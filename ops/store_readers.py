"""Which engines fetch which version from the payload store right now, as their reports tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec
import structlog

from broker.api import Broker
from pipeline.metrics import REPORT_PREFIX, WorkerReport
from stages.weights.receive import READING_LABEL

log = structlog.get_logger("headrace.weights")


class StoreReaders:
    """Heard from reports; a reader holds its version from the first report that names it, for `hold_s` at the most."""

    def __init__(self, broker: Broker, *, hold_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._broker: Final = broker
        self._hold_s: Final = hold_s
        self._now: Final = now
        self._readers: Final[dict[tuple[str, str], tuple[tuple[int, int], float]]] = {}
        """(stage, worker) → the version and generation that it fetches, and since when."""

    async def listen(self) -> None:
        """Hear reports, for ever."""
        async with self._broker.listen(f"{REPORT_PREFIX}.{self._broker.run}.>") as announcements:
            async for _subject, data in announcements:
                self.hear(msgspec.msgpack.decode(data, type=WorkerReport))

    def hear(self, report: WorkerReport) -> None:
        """Take in what a worker says of itself."""
        who, label = (report.stage, report.worker), report.labels.get(READING_LABEL)
        if label is None:
            self._readers.pop(who, None)
            return
        version, _, generation = label.partition("-")
        what = (int(version), int(generation))
        if who not in self._readers or self._readers[who][0] != what:
            self._readers[who] = (what, self._now())

    def held(self) -> Collection[tuple[int, int]]:
        """What is being fetched."""
        for who, (what, since) in list(self._readers.items()):
            if self._now() - since > self._hold_s:
                log.warning(
                    "a reader held a version for too long: it is kept no longer", reader=who[1], version=what[0]
                )
                del self._readers[who]
        return {what for what, _ in self._readers.values()}
