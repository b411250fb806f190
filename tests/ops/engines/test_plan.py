"""[engine]: which servers a run has, and what can't work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ops.config import decode_config
from ops.doctor.checks import Level
from ops.doctor.engines import check_engines
from ops.engines.commands import server_command
from ops.engines.plan import EngineChoice, EnginePlan, chosen_engine, engine_plans, server_settings
from ops.run_folder import RunFolder
from ops.running.engines import engine_process
from schemas.config import EngineKind, EngineSection
from schemas.errors import ConfigError


def config(**engine):
    streams = [{"name": "words", "stream_id": "words", "sampling_weight": 1.0}]
    return decode_config({"run": {"id": "r"}, "streams": streams, "arena": {"url": "local"}, "engine": engine})


def test_a_run_has_the_servers_that_it_starts_and_those_that_run_already() -> None:
    plans = engine_plans(config(kind="vllm", count=2, urls=["http://10.0.0.7:8000/"]).engine)
    assert [plan.name for plan in plans] == ["engine-0", "engine-1", "10.0.0.7-8000"]
    assert [plan.attached for plan in plans] == [False, False, True]
    assert [plan.name for plan in engine_plans(config(kind="sglang").engine)] == ["engine-0"]
    assert [plan.attached for plan in engine_plans(config(kind="vllm", urls=["http://h:1"]).engine)] == [True]
    assert engine_plans(config().engine) == []


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"kind": "vllm", "count": -1}, "engine.count: expected at least 0, found -1"),
        ({"kind": "builtin", "urls": ["http://h:1"]}, "engine.urls: is for servers"),
        ({"kind": "vllm", "urls": ["h:8000"]}, "engine.urls: expected http://host:port, found 'h:8000'"),
        ({"kind": "vllm", "urls": ["http://u:secret@h:1"]}, "engine.api_key_env"),
        ({"kind": "vllm", "urls": ["http://h:1", "http://h:1/"]}, "each server once"),
        ({"kind": "vllm", "count": 2, "ports": [8000]}, "engine.ports: expected one for each of 2 servers, found 1"),
        ({"kind": "vllm", "count": 2, "ports": [8000, 8000]}, "engine.ports: expected different ports"),
        ({"kind": "vllm", "gpus": ["0"]}, 'engine.device = "cuda"'),
        ({"kind": "vllm", "device": "tpu"}, "engine.device: expected cpu or cuda, found 'tpu'"),
        ({"kind": "vllm", "device": "cuda"}, "engine.python"),
        (
            {
                "kind": "vllm",
                "device": "cuda",
                "python": "p",
                "count": 2,
                "gpus": ["0", "1", "2"],
                "gpus_per_engine": 2,
            },
            "engine.gpus: expected 4 ids for 2 engines of 2, found 3",
        ),
        ({"kind": "vllm", "start_timeout_s": 0}, "engine.start_timeout_s"),
        ({"kind": "vlm"}, "engine.kind"),
    ],
)
def test_what_can_not_work_is_refused_with_its_key(engine, words) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**engine)
    assert words in str(raised.value)
    assert "secret" not in str(raised.value)


def settings(section: EngineSection, slot: int = 0):
    plan = EnginePlan(name=f"engine-{slot}", kind=section.kind, slot=slot)
    return server_settings(section, plan, model="/policy", max_context=256, port=8000 + slot, api_key="")


def test_gpus_are_shared_out_in_order() -> None:
    section = config(
        kind="vllm", device="cuda", command=["vllm", "serve"], count=2, gpus=["0", "1", "2", "3"], gpus_per_engine=2
    ).engine
    argv, env = server_command(section.kind, settings(section, 1))
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert argv[:2] == ["vllm", "serve"]
    assert argv[argv.index("--dtype") + 1] == "bfloat16"


def test_own_arguments_and_variables_come_last() -> None:
    section = config(kind="sglang", python=sys.executable, args=["--mem-fraction-static", "0.5"], env={"A": "b"}).engine
    argv, env = server_command(section.kind, settings(section))
    assert argv[0] == sys.executable
    assert argv[-2:] == ["--mem-fraction-static", "0.5"]
    assert env["A"] == "b"


def test_an_interpreter_that_is_not_there_is_told(monkeypatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.python: .* nothing to run at /no/python"):
        settings(config(kind="vllm", python="/no/python").engine)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"python -m ops\.engines\.cpu_environment"):
        settings(config(kind="vllm").engine)


def test_a_worker_s_engine_is_named_by_hand_or_by_its_place() -> None:
    section = config(kind="vllm").engine
    by_slot = chosen_engine(EngineChoice(slot=3), section)
    assert (by_slot.name, by_slot.attached) == ("engine-3", False)
    attached = chosen_engine(EngineChoice(url="http://h:9/", kind="sglang"), section)
    assert (attached.name, attached.kind, attached.url) == ("h-9", EngineKind.SGLANG, "http://h:9")
    with pytest.raises(ConfigError, match="--kind vllm or sglang, found 'builtin'"):
        chosen_engine(None, config().engine)


def test_each_engine_has_a_worker_process_that_ends_after_who_uses_it(tmp_path: Path) -> None:
    plan = EnginePlan(name="h-9", kind=EngineKind.VLLM, url="http://h:9")
    spec = engine_process(plan, RunFolder(tmp_path), {})
    assert spec.serves_others
    assert not spec.essential
    assert spec.argv[-6:] == ["--kind", "vllm", "--url", "http://h:9", "--run-dir", str(tmp_path)]


def test_doctor_tells_what_the_servers_lack(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))

    def levels(driver=(), **engine) -> dict[str, Level]:
        found = check_engines(config(**engine), gpus=driver, available_bytes=2**30, environ={})
        return {finding.check: finding.level for finding in found}

    assert levels() == {"engine": Level.OK}
    assert levels(kind="vllm")["engine environment"] is Level.ERROR
    assert levels(kind="vllm")["engine memory"] is Level.WARNING
    assert levels(kind="vllm", python=sys.executable)["engine environment"] is Level.WARNING
    assert levels(kind="vllm", count=0)["engine"] is Level.NOTE
    assert levels(kind="vllm", count=0, api_key_env="NO_KEY_HERE")["engine key"] is Level.ERROR
    cuda = {"kind": "vllm", "device": "cuda", "command": [sys.executable], "gpus": ["0", "1"], "count": 2}
    assert levels(**cuda)["engine gpus"] is Level.ERROR
    assert levels(driver=("H200",), **cuda)["engine gpus"] is Level.ERROR
    assert levels(driver=("H200", "H200"), **cuda)["engine gpus"] is Level.OK
