"""The tests of this folder share `synthetic`, which importlib mode can't find by itself."""

import asyncio
import sys
from pathlib import Path

import anyio
import cyclopts
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic import SyntheticRun

from broker.embedded import EmbeddedServer
from broker.recording import Recording
from ops.cli.dead import app as dead_app
from ops.cli.export import export
from ops.cli.inspect import inspect
from ops.cli.publish import app as publish_app
from ops.cli.record import record
from ops.cli.replay import replay
from ops.cli.report import report
from ops.cli.schema import schema
from ops.cli.tap import tap
from ops.cli.why import why
from ops.connection import find_run


@pytest.fixture(scope="session")
def chaotic():
    """A whole run on an in-memory broker with every kind of mishap in it. Only to be read."""
    return asyncio.run(SyntheticRun(seed=7, num_groups=24).build())


@pytest.fixture(scope="session")
def recorded(chaotic, tmp_path_factory):
    """The path of its recording."""
    path = tmp_path_factory.mktemp("recorded") / "run.hrrec"
    asyncio.run(chaotic.record(path))
    return path


@pytest.fixture
def recording(recorded):
    with Recording(recorded) as opened:
        yield opened


@pytest.fixture
async def small():
    """A few groups, nothing goes wrong."""
    return await SyntheticRun(seed=1, num_groups=4, mishaps=False).build()


@pytest.fixture(scope="session")
def app():
    found = cyclopts.App(name="headrace")
    for command in (record, replay, inspect, export, report, why, tap, schema):
        found.command(command)
    found.command(dead_app)
    found.command(publish_app)
    return found


@pytest.fixture
def headrace(app, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")

    def call(*arguments):
        """Exit code, stdout, stderr."""
        try:
            code = app([str(argument) for argument in arguments], result_action="return_value", exit_on_error=True)
        except SystemExit as ended:
            code = ended.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture(scope="module")
def replayed(app, recorded, tmp_path_factory):
    """A run's folder that a replay filled, with its broker running."""
    folder = tmp_path_factory.mktemp("runs") / "again"
    assert app(["replay", str(recorded), "--into", str(folder), "--quiet"], result_action="return_value") == 0
    server = EmbeddedServer(folder / "nats")
    anyio.run(server.start)
    run = find_run(str(folder))
    run.write_endpoints(
        type(run.read_endpoints())(run="r", broker_url=server.url, broker_login=server.connect_settings())
    )
    yield folder
    anyio.run(server.stop)
