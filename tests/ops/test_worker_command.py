"""`headrace worker` and `headrace down` say at once what they can't do, and why."""

from __future__ import annotations

import pytest

from ops.cli import main
from ops.config import decode_config
from ops.run_folder import Endpoints, RunFolder


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """Of a run that was started; its broker is gone."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_config(decode_config({"streams": [{"name": "a", "stream_id": "a"}]}))
    folder.write_endpoints(Endpoints(run="run", broker_url="nats://127.0.0.1:1"))
    return folder


def refused(capsys, *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(command))
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert told.startswith("headrace: ")
    return told


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (["bogus"], "expected some of sampling, fan_out, arena_launch, rewards, assembly, weights, retention, gateway"),
        (["rewards", "retetion"], "found 'retetion'; did you mean 'retention'?"),
        ([], "found none"),
        (["engine", "--kind", "bogus"], "expected --kind vllm or sglang, found 'bogus'"),
    ],
)
def test_a_stage_that_there_is_not_is_named_without_asking_the_broker(folder, capsys, stages, told) -> None:
    assert told in refused(capsys, "worker", *stages, "--run-dir", str(folder.path))


def test_a_folder_without_a_run_is_named(tmp_path, capsys) -> None:
    told = refused(capsys, "worker", "rewards", "--run-dir", str(tmp_path / "nothing"))
    assert "nothing/config.json: expected the folder of a run that was started" in told


def test_down_of_a_run_that_does_not_run_says_so(folder, tmp_path, capsys) -> None:
    assert "is not running on this machine" in refused(capsys, "down", str(folder.path))
    with folder.lock():  # somebody looks at what is over
        assert "is not running on this machine" in refused(capsys, "down", str(folder.path))
    assert "has no nodes" in refused(capsys, "down", str(folder.path), "--node", "n")
    assert "expected the folder of a run that was started" in refused(capsys, "down", str(tmp_path / "nothing"))
    assert "expected a readable topology file" in refused(capsys, "down", str(tmp_path / "nothing.toml"))
