"""What a worker tells of its connections to the broker."""

from __future__ import annotations

from broker.connect import connect
from broker.embedded import EmbeddedServer
from ops.config import decode_config
from ops.run_folder import Endpoints, RunFolder
from ops.workers.context import WorkerContext

CONFIG = decode_config({"run": {"id": "r"}, "streams": [{"name": "s", "stream_id": "s"}]})


async def test_a_worker_tells_whether_it_is_connected_to_what_and_how_often_anew(tmp_path, wait_until):
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    try:
        async with connect(server.url, "r", server.connect_settings(), create=True) as broker:
            context = WorkerContext(RunFolder(tmp_path / "run"), CONFIG, Endpoints(run="r"), broker)
            context.metrics("fan_out")
            told = context.reports()[0]
            assert told.labels["broker"] == f"{server.url}, {server.url}"
            assert told.gauges == {"broker_connected": 1.0, "broker_reconnects": 0.0}
            await server.kill()
            await wait_until(lambda: context.reports()[0].gauges["broker_connected"] == 0.0)
            assert "away since" in context.reports()[0].labels["broker"]
            await server.start()
            again = {"broker_connected": 1.0, "broker_reconnects": 2.0}
            await wait_until(lambda: context.reports()[0].gauges == again)
    finally:
        await server.stop()
