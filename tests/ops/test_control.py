"""Pause, resume, drain: what stands on the log is what sampling obeys, and what status says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.memory import MemoryBroker, MemoryServer
from ops.cli import main
from ops.config import decode_config, sampling_settings
from ops.control import Standing, ask, standing
from ops.run_folder import Endpoints, RunFolder
from ops.status import run_status
from schemas.messages.sampling import Control, ControlAction, RunStarted
from stages.sampling.fold import SamplingFold

CONFIG = decode_config({"streams": [{"name": "s", "stream_id": "s"}]})


def started(ordinal):
    return RunStarted(ordinal=ordinal, config_json=b"{}", config_digest="d", headrace_version="0")


@given(st.lists(st.sampled_from([*ControlAction, None]), max_size=12))
def test_what_is_said_to_be_in_force_is_what_sampling_obeys(actions):
    fold = SamplingFold(sampling_settings(CONFIG))
    state, found = fold.initial(), Standing()
    for number, action in enumerate(actions):
        message = started(number) if action is None else Control(id=str(number), action=action)
        fold.step(state, message)
        found = found.after(message, 0.0)
        assert (found.paused, found.draining) == (state.paused, state.draining)


async def test_an_instruction_stands_with_its_reason_until_it_is_taken_back():
    broker = MemoryBroker(MemoryServer(), "r")
    await ask(broker, ControlAction.PAUSE, "lunch")
    found = await standing(broker)
    assert (found.word, found.reason) == ("paused", "lunch")
    await ask(broker, ControlAction.RESUME)
    assert (await standing(broker)).word == ""


async def test_status_tells_of_a_drain():
    broker = MemoryBroker(MemoryServer(), "r")
    await ask(broker, ControlAction.DRAIN, "maintenance")
    asked = (await run_status(broker, (), listen_s=0.0)).asked
    assert (asked.word, asked.reason) == ("draining", "maintenance")


@pytest.fixture
async def folder(tmp_path):
    """The folder of a run whose server answers."""
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    try:
        settings = server.connect_settings()
        async with connect(server.url, "r", settings, create=True):
            pass
        found = RunFolder(tmp_path)
        found.write_endpoints(Endpoints(run="r", broker_url=server.url, broker_login=settings))
        yield found
    finally:
        await server.stop()


def test_the_commands_say_what_is_in_force_now(folder, capsys):
    said = []
    for command in ("pause", "drain", "resume"):
        assert main([command, str(folder.path), "--reason", "why not", "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out)["in_force"])
    assert said == ["paused", "paused", ""]


def test_a_run_that_is_over_is_not_paused(folder, tmp_path_factory, capsys):
    over = RunFolder(tmp_path_factory.mktemp("over"))
    with pytest.raises(SystemExit):
        main(["pause", str(over.path)])
    assert "expected the folder of a run" in capsys.readouterr().err
