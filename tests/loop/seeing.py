"""Looks at a run wherever a fault is named, and tells after how many seconds each place named it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

from broker.api import Broker
from ops.metrics.serving import STRIDE
from ops.status import run_status
from ops.top.model import Model
from ops.top.watching import watch
from ops.troubles import Trouble
from ops.wiring import STAGES

sys.path.insert(0, str(Path(__file__).parents[1] / "ops" / "metrics"))

from firing import RULES, Series, firing

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0
EVALUATED_EVERY_S = 5.0
"""Scrape and evaluation, as docs/metrics.md and ops/deploy/alerts.yml have them."""
_PLACES = 12


class Alerts:
    """What Prometheus would know of a run's endpoints, and which of ops/deploy/alerts.yml would fire by now."""

    def __init__(self, port: int, hosts: Sequence[str] = ("127.0.0.1",)) -> None:
        self._targets = [
            f"{host}:{port + place + further}" for host in hosts for place in range(_PLACES) for further in (0, STRIDE)
        ]
        self._up: dict[str, bool] = {}
        """Of every endpoint that ever answered."""
        self._holds_since: dict[str, float] = {}
        self.fires: set[str] = set()

    async def run(self) -> None:
        """Scrape and evaluate, for ever."""
        while True:
            holds, now_s = await self.hold(), time.monotonic()
            self._holds_since = {name: self._holds_since.get(name, now_s) for name in holds}
            self.fires = {name for name, since_s in self._holds_since.items() if now_s - since_s >= _patience_s(name)}
            await anyio.sleep(EVALUATED_EVERY_S)

    async def forget_gone(self) -> None:
        """Endpoints that ended for good are no targets any more."""
        await self.hold()
        self._up = {target: up for target, up in self._up.items() if up}
        while "HeadraceProcessDown" in self.fires:
            await anyio.sleep(0.2)

    async def hold(self) -> set[str]:
        """Rules whose expression holds on what is served now."""
        series: list[Series] = []

        async def scrape(target: str) -> None:
            try:
                answer = await http.get(f"http://{target}/metrics")
            except httpx.HTTPError:
                if target in self._up:
                    self._up[target] = False
                return
            self._up[target] = True
            for family in text_string_to_metric_families(answer.text):
                series.extend((sample.name, sample.labels, sample.value) for sample in family.samples)

        async with httpx.AsyncClient(timeout=1.0) as http, anyio.create_task_group() as tasks:
            for target in self._targets:
                tasks.start_soon(scrape, target)
        series += [("up", {"job": "headrace", "instance": target}, float(up)) for target, up in self._up.items()]
        return firing(series)


def _patience_s(name: str) -> float:
    """A rule's `for`."""
    (rule,) = [rule for rule in RULES if rule["alert"] == name]
    return float(str(rule.get("for", "0s")).removesuffix("s"))


class Watched:
    """A run under observation."""

    def __init__(
        self, folder: Path, open_broker: Callable[[], AbstractAsyncContextManager[Broker]], alerts: Alerts, model: Model
    ) -> None:
        self.folder, self.broker, self.alerts, self.model = folder, open_broker, alerts, model

    async def until_named(self, kind: str, what: str, alert: str) -> dict[str, float]:
        """Seconds until status, top, the metrics, their alert and the report name it.

        Raises:
            AssertionError: one of them did not within `WITHIN_S`.
        """
        began, found = time.monotonic(), {}

        def named(troubles: Sequence[Trouble]) -> bool:
            return any(one.kind == kind and what in one.what for one in troubles)

        async def status() -> bool:
            async with self.broker() as broker:
                return named((await run_status(broker, STAGES, listen_s=1.5)).troubles)

        async def top() -> bool:
            return self.names(kind, what)

        async def metrics() -> bool:
            return alert in await self.alerts.hold()

        async def fires() -> bool:
            return alert in self.alerts.fires

        async def report() -> bool:
            return named(await self._reported())

        async def wait_for(name: str, looks) -> None:
            while not await looks():
                await anyio.sleep(0.2)
            found[name] = round(time.monotonic() - began, 1)

        places = {"top": top, "status": status, "metrics": metrics, "alert": fires, "report": report}
        with anyio.move_on_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                for name, looks in places.items():
                    tasks.start_soon(wait_for, name, looks)
        assert set(found) == set(places), f"{kind}: named only in {found}"
        return {name: found[name] for name in places}

    async def until_well(self, kind: str, what: str, alert: str, *, deadline_s: float = 90.0) -> None:
        """Until it is named no more, and its alert is over."""
        await wait_until(
            lambda: not self.names(kind, what) and alert not in self.alerts.fires,
            f"the end of {kind} {what}",
            deadline_s=deadline_s,
            every_s=0.2,
        )

    def names(self, kind: str, what: str) -> bool:
        """Whether top names it now."""
        return any(one.kind == kind and what in one.what for one in self.model.troubles(time.time()))

    async def _reported(self) -> list[Trouble]:
        """The troubles in a report that is written now."""
        command = [sys.executable, "-m", "ops", "report", str(self.folder), "--json"]
        done = await anyio.run_process(command, cwd=ROOT, check=False)
        return msgspec.convert(json.loads(done.stdout)["troubles"], list[Trouble]) if done.returncode == 0 else []


@asynccontextmanager
async def watched(
    run: str, folder: Path, open_broker: Callable[[], AbstractAsyncContextManager[Broker]], alerts: Alerts
) -> AsyncGenerator[Watched]:
    """A run with `headrace top` and its alerts looking at it all the time."""
    model = Model(run)
    async with open_broker() as broker, anyio.create_task_group() as tasks:
        tasks.start_soon(watch, broker, model)
        tasks.start_soon(alerts.run)
        yield Watched(folder, open_broker, alerts, model)
        tasks.cancel_scope.cancel()
