"""What people see of engines: one line, one table, and what binds the run's capacity."""

from __future__ import annotations

from io import StringIO

import anyio
import msgspec
from rich.console import Console

from broker.memory import MemoryBroker, MemoryServer
from ops.cli.engine import engine_table
from ops.engines.listening import heard_engines, load_line
from ops.status import run_status
from ops.top.model import Model
from ops.top.views import engines
from pipeline.metrics import Metrics, report_subject
from schemas.messages.engines import EngineAnnouncement, EngineState, engine_subject


def announced(name: str, **fields) -> EngineAnnouncement:
    told = {
        "kind": "vllm",
        "state": EngineState.SERVING,
        "version": 7,
        "capacity": 64,
        "url": "http://127.0.0.1:1",
        **fields,
    }
    return EngineAnnouncement(name=name, since_unix_s=100.0, unix_time_s=160.0, **told)


FLEET = [
    announced("engine-0", running=30, waiting=2),
    announced("engine-1", version=6, running=12),
    announced("engine-2", state=EngineState.QUARANTINED, reason="no answer within 5 s", num_restarts=1),
]


async def told(broker: MemoryBroker) -> None:
    """Engines and sampling say how they are, again and again."""
    sampling = Metrics("demo", "sampling")
    sampling.gauges.update(capacity=0, groups_running=12, groups_waiting=4)
    sampling.wait_for("credit, bound by max_staleness: 12 groups running, 4 waiting")
    while True:
        for one in FLEET:
            await broker.announce(engine_subject("demo", one.name), msgspec.msgpack.encode(one))
        await broker.announce(report_subject("demo", "sampling"), msgspec.msgpack.encode(sampling.report()))
        await anyio.sleep(0.005)


async def test_status_tells_engines_and_what_binds_capacity() -> None:
    broker = MemoryBroker(MemoryServer(), "demo")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(told, broker)
        assert [one.name for one in await heard_engines(broker, listen_s=0.1)] == [one.name for one in FLEET]
        found = await run_status(broker, ("sampling",), listen_s=0.1)
        tasks.cancel_scope.cancel()
    assert found.engines == FLEET
    assert found.pacing == "capacity 0 groups, bound by max_staleness: 12 groups running, 4 waiting"
    assert load_line(found.engines) == "2 of 3 serving version 6 to 7, 42 of 128 requests and 2 queued"
    assert load_line([]) == ""


def drawn(table: object) -> str:
    console = Console(width=110, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


def test_an_engine_that_does_not_serve_says_why() -> None:
    text = drawn(engine_table(FLEET, 160.0))
    assert "no answer within 5 s" in text
    assert "30/64" in text
    assert "http://127.0.0.1:1" in text


def test_top_shows_servers_in_the_place_of_gateways() -> None:
    model = Model("demo")
    model.trained_step = 8
    for one in FLEET:
        model.engines[one.name] = one
    text = drawn(engines(model, 161.0, 200))
    assert "30/64" in text
    assert "quarantined: no answer" in text
    assert "no sign of life for 60 s" in drawn(engines(model, 220.0, 200))
    model.forget_silent(400.0)
    assert not model.engines
