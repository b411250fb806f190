"""A package that a config needs and that is not there is told before anything starts."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ops import extras
from ops.config import RunConfig, decode_config
from ops.extras import check_torch_is_there, needed_extras
from schemas.errors import ConfigError


def config(**sections: object) -> RunConfig:
    return decode_config({"streams": [{"name": "s", "stream_id": "s"}], "arena": {"url": "http://x"}, **sections})


@pytest.fixture
def without_torch(monkeypatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torch" else find_spec(name))


def test_a_run_that_needs_torch_says_how_to_get_it_and_what_runs_without(without_torch) -> None:
    with pytest.raises(ConfigError, match=r"found no torch: pip install 'headrace\[train\]'.*examples/smoke\.toml"):
        check_torch_is_there(config())


def test_a_run_of_stand_ins_needs_no_torch(without_torch) -> None:
    check_torch_is_there(config(engine={"kind": "scripted"}, training={"backend": "standin"}))


def test_extras_follow_from_what_the_config_uses() -> None:
    stand_ins = {"engine": {"kind": "scripted"}, "training": {"backend": "standin"}}
    assert needed_extras(config(**stand_ins)) == []
    assert needed_extras(config(**stand_ins, broker={"url": "amqp://127.0.0.1"})) == ["rabbitmq"]
    assert needed_extras(config(arena={"url": "local"}, metrics={"port": 9100})) == ["train", "arena", "metrics"]
