"""Stream configs: defaults, the three places they come from, and every refusal."""

import base64

import msgspec
import pytest

from schemas.config_arena import (
    ArenaSettings,
    LlmProtocol,
    RewardRef,
    StreamConfig,
    StreamRunner,
    check_streams,
    protocol_of,
    resolve_streams,
)
from schemas.errors import ConfigError

TOML = b'[[streams]]\nname = "a.b"\nstream_id = "1"\n[[streams]]\nname = "c"\nstream_id = "2"\nsampling_weight = 3\n'


def _stream(**changes) -> StreamConfig:
    return StreamConfig(**{"name": "a", "stream_id": "1", **changes})


@pytest.mark.parametrize(("key", "protocol"), [
    ("claude-code@2", LlmProtocol.ANTHROPIC), ("My-Claude@1", LlmProtocol.ANTHROPIC), ("codex-cli@1", LlmProtocol.RESPONSES),
    ("mini-swe-agent@2", LlmProtocol.CHAT_COMPLETIONS), ("", LlmProtocol.CHAT_COMPLETIONS), ("loop@claude", LlmProtocol.CHAT_COMPLETIONS),
])  # fmt: skip
def test_the_protocol_follows_the_harness_key(key, protocol) -> None:
    assert protocol_of(key) is protocol
    assert protocol_of(key, LlmProtocol.RESPONSES) is LlmProtocol.RESPONSES


@pytest.mark.parametrize(("changes", "path"), [
    ({"name": "a b"}, "name"), ({"name": ""}, "name"), ({"name": "a>"}, "name"), ({"stream_id": " "}, "stream_id"),
    ({"sampling_weight": 0.0}, "sampling_weight"), ({"sampling_weight": -1.0}, "sampling_weight"),
    ({"sampling_weight": float("nan")}, "sampling_weight"), ({"sampling_weight": float("inf")}, "sampling_weight"),
    ({"harness": "no-version"}, "harness"), ({"harness": "@1"}, "harness"), ({"harness": "a@b@c"}, "harness"),
    ({"expected_reward_ref": RewardRef(key="", version="1")}, "expected_reward_ref"),
    ({"expected_reward_ref": RewardRef(key="r", version=" ")}, "expected_reward_ref"),
    ({"reward_threshold": float("nan")}, "reward_threshold"), ({"reward_transform": "no_colon"}, "reward_transform"),
    ({"task_envs": {"": "x"}}, "task_envs"), ({"runner": StreamRunner.FUNCTION}, "agent"), ({"evaluation_slots": 0}, "evaluate_every_versions"),
])  # fmt: skip
def test_a_bad_stream_is_refused_by_the_path_of_its_key(changes, path) -> None:
    with pytest.raises(ConfigError, match=rf"^streams\[0\]\.{path}"):
        check_streams([_stream(**changes)])


def test_names_and_ids_are_unique_and_there_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match=r"streams\[1\]\.name: 'a'"):
        check_streams([_stream(), _stream(stream_id="2")])
    with pytest.raises(ConfigError, match=r"streams\[1\]\.stream_id: '1'"):
        check_streams([_stream(), _stream(name="b")])
    with pytest.raises(ConfigError, match="at least one"):
        check_streams([])


@pytest.mark.parametrize(
    "text",
    [
        b'{"name":"a","stream_id":"1","weight":2}',
        b'{"name":"a","stream_id":"1","expected_reward_ref":{"key":"r"}}',
        b'{"name":"a","stream_id":"1","llm_protocol":"grpc"}',
        b'{"name":"a"}',
    ],
)
def test_unknown_fields_half_a_reward_and_other_protocols_are_refused(text) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=StreamConfig)


def test_a_streams_own_envs_and_harness_go_before_the_common_ones() -> None:
    settings = ArenaSettings(harness="h@1", task_envs={"A": "common", "B": "common"})
    own, plain = resolve_streams(
        [_stream(harness="x@2", task_envs={"B": "own"}), _stream(name="b", stream_id="2")], settings, {}
    )
    assert (own.harness, own.task_envs) == ("x@2", {"A": "common", "B": "own"})
    assert (plain.harness, plain.task_envs) == ("h@1", {"A": "common", "B": "common"})


def test_streams_come_inline_from_a_file_or_from_the_environment(tmp_path) -> None:
    path = tmp_path / "streams.toml"
    path.write_bytes(TOML)
    from_file = resolve_streams([], ArenaSettings(streams_file=str(path)), {})
    from_env = resolve_streams([], ArenaSettings(streams_env="S"), {"S": base64.b64encode(TOML).decode()})
    as_json = msgspec.json.encode({"streams": msgspec.to_builtins(from_file)})
    from_json = resolve_streams([], ArenaSettings(streams_env="S"), {"S": base64.b64encode(as_json).decode()})
    assert from_file == from_env == from_json
    assert [(s.name, s.sampling_weight) for s in from_file] == [("a.b", 1.0), ("c", 3.0)]


def test_exactly_one_place_gives_the_streams() -> None:
    with pytest.raises(ConfigError, match="expected exactly one"):
        resolve_streams([], ArenaSettings(), {})
    with pytest.raises(ConfigError, match="expected exactly one"):
        resolve_streams([_stream()], ArenaSettings(streams_env="S"), {"S": ""})


def test_a_place_that_can_not_be_read_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"arena\.streams_file: can't read"):
        resolve_streams([], ArenaSettings(streams_file=str(tmp_path / "none.toml")), {})
    with pytest.raises(ConfigError, match="S is not set"):
        resolve_streams([], ArenaSettings(streams_env="S"), {})
    with pytest.raises(ConfigError, match="no valid base64"):
        resolve_streams([], ArenaSettings(streams_env="S"), {"S": "%%%"})
    bad = base64.b64encode(b'{"streams": [], "more": 1}').decode()
    with pytest.raises(ConfigError, match=r"arena\.streams_env S: .*unknown field"):
        resolve_streams([], ArenaSettings(streams_env="S"), {"S": bad})


@pytest.mark.parametrize(("changes", "key"), [
    ({"runner": "function"}, "agent"),
    ({"runner": "function", "agent": "no-path"}, "agent"),
    ({"runner": "verifiers", "agent": "wordle", "rows": "many"}, "rows"),
    ({"runner": "verifiers", "agent": "wordle", "rows": "0"}, "rows"),
    ({"runner": "function", "agent": "m:f", "agent_processes": 0}, "agent_processes"),
    ({"runner": "function", "agent": "m:f", "agent_timeout_s": 0.0}, "agent_timeout_s"),
    ({"rows": "tasks.jsonl"}, "rows"),
    ({"runner": "online", "agent": "m:f"}, "agent"),
    ({"runner": "online", "rows": "0"}, "rows"),
    ({"runner": "online", "rows": "10", "evaluate_every_versions": 5}, "rows"),
    ({"runner": "online", "claim_deadline_s": 0.0}, "claim_deadline_s"),
    ({"runner": "online", "reward_deadline_s": float("inf")}, "reward_deadline_s"),
])  # fmt: skip
def test_an_agents_settings_are_checked_by_path(changes, key) -> None:
    stream = msgspec.convert({"name": "s", "stream_id": "s", **changes}, StreamConfig)
    with pytest.raises(ConfigError, match=rf"^streams\[0\]\.{key}"):
        check_streams([stream])


def test_agents_of_both_kinds_are_taken() -> None:
    check_streams([
        StreamConfig(name="f", stream_id="f", runner=StreamRunner.FUNCTION, agent="m.n:f", rows="tasks.jsonl"),
        StreamConfig(name="v", stream_id="v", runner=StreamRunner.VERIFIERS, agent="wordle", rows="500"),
        StreamConfig(name="o", stream_id="o", runner=StreamRunner.ONLINE, rows="10"),
        StreamConfig(name="e", stream_id="e", runner=StreamRunner.ONLINE, rows="t.jsonl", evaluate_every_versions=5),
    ])  # fmt: skip
