"""Experiment trackers get each step's statistics and the run's config without secrets."""

from __future__ import annotations

import json
import sqlite3

import pytest

from ops.config import RunConfig, load_config
from ops.redaction import redacted
from schemas.config import EngineSection
from schemas.config_arena import StreamConfig
from stages.training.errors import TrainingError
from stages.training.trackers import open_tracker


def test_secrets_are_masked_wherever_they_stand(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        """
[broker]
url = "amqp://me:hunter2hunter2@mq:5672/"
token_file = "/run/secrets/token"
[arena]
url = "https://arena.example.org"
[arena.task_envs]
GITHUB_TOKEN = "ghp_abcdefghijklmnop"
MODE = "fast"
[[streams]]
name = "a"
stream_id = "a"
[streams.task_envs]
DB_PASSWORD = "hunter3hunter3"
"""
    )
    config = load_config(file)
    told = redacted(config)
    text = str(told)
    assert "hunter" not in text
    assert "ghp_" not in text
    assert told["broker"]["url"] == "amqp://***@mq:5672/"
    assert told["broker"]["token_file"] == "/run/secrets/token"
    assert told["arena"]["task_envs"] == {"GITHUB_TOKEN": "***", "MODE": "***"}
    assert told["training"] == redacted(RunConfig())["training"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"judge": {"openaiApiKey": "abc"}}, {"judge": {"openaiApiKey": "***"}}),
        ({"credentials": {"user": "u", "tries": 3}}, {"credentials": {"user": "***", "tries": 3}}),
        ({"DB_PASS": "abc", "gh-pat": "abc"}, {"DB_PASS": "***", "gh-pat": "***"}),
        ({"headers": {"X-Any": "abc"}}, {"headers": {"X-Any": "***"}}),
        ({"args": ["--api-key", "abc", "--mode", "fast"]}, {"args": ["--api-key", "***", "--mode", "fast"]}),
        ({"judge": "https://u:p@ss@h/x"}, {"judge": "https://***@h/x"}),
        ({"text": "use ghp_abcdefghijklmnopqrst now"}, {"text": "use *** now"}),
        *(
            (plain, plain)
            for plain in (
                {"max_tokens": 5, "answer_key": "solution", "tokenizer": "bpe", "token_budget": 4},
                {"token_env": "JUDGE_TOKEN", "password_file": "/run/secrets/p", "compass": "north", "author": "me"},
                {"system": "Say the secret word", "url": "https://h/x?y=1", "pass_threshold": 0.5, "password": ""},
            )
        ),
    ],
)
def test_an_agents_settings_are_told_but_for_secrets(settings, told):
    stream = StreamConfig(name="a", stream_id="a", agent_args=settings)
    assert redacted(RunConfig(streams=[stream]))["streams"][0]["agent_args"] == told


def test_environments_and_keys_of_engines_are_masked():
    engine = EngineSection(env={"MODE": "fast"}, args=["--api-key", "abc", "--seed", "3"])
    told = redacted(RunConfig(engine=engine))["engine"]
    assert told["env"] == {"MODE": "***"}
    assert told["args"] == ["--api-key", "***", "--seed", "3"]
    assert told["api_key_env"] == ""


def test_a_tracker_that_is_not_known_or_not_installed_is_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match=r"expected some of tensorboard, wandb, trackio, found 'mlflow'"):
        open_tracker("mlflow", tmp_path, "r", {})
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(TrainingError, match=r"wandb is not installed: pip install 'headrace\[trackers\]'"):
        open_tracker("wandb", tmp_path, "r", {})


@pytest.mark.resources
def test_wandb_offline_and_trackio_keep_what_a_run_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for _incarnation in range(2):
        for name in ("wandb", "trackio"):
            sink = open_tracker(name, tmp_path, "quick", {"training": {"seed": 3}})
            for step in (1, 2):
                sink.write(step, {"loss": 1.0 / step, "reward/mean": 0.25 * step})
            sink.close()
    files = list((tmp_path / "wandb").rglob("run-quick.wandb"))
    assert len(files) == 2
    assert all(b"reward/mean" in file.read_bytes() for file in files)
    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert [(run, step) for run, step, _ in rows] == [("quick", 1), ("quick", 2)] * 2
    assert json.loads(rows[1][2]) == {"loss": 0.5, "reward/mean": 0.5}
