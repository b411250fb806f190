from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest

from ops.config import RunConfig, apply_override, decode_config, fold_digest, load_config, run_streams
from schemas.errors import ConfigError

ROOT = Path(__file__).parents[2]
STREAM = {"name": "a", "stream_id": "a"}


def tree(**sections) -> dict:
    return {"streams": [dict(STREAM)], **sections}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_config_or_says_what_it_is(path: Path) -> None:
    if "local_arena" in path.name or "faults" in path.name:
        return
    if path.name == "cluster.toml":
        with pytest.raises(ConfigError, match="found a topology of nodes: `headrace up` starts its nodes"):
            load_config(path)
        return
    assert isinstance(load_config(path), RunConfig)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"sampling": {"group_per_step": 4}},
            r"sampling\.group_per_step: unknown key; did you mean 'groups_per_step'\?",
        ),
        ({"samplings": {}}, r"samplings: unknown key; did you mean 'sampling'\?"),
        ({"assembly": {"estimatr": {}}}, r"assembly\.estimatr: unknown key; did you mean 'estimator'\?"),
        ({"assembly": {"groups_per_step": 4}}, r"assembly\.groups_per_step: is decided by"),
        ({"streams": [{**STREAM, "sampling_wait": 1}]}, r"streams\[0\]\.sampling_wait: unknown key"),
        ({"sampling": {"groups_per_step": "8"}}, r"sampling\.groups_per_step: Expected `int`, got `str`"),
        ({"sampling": {"groups_per_step": 0}}, r"sampling\.groups_per_step: expected at least 1, found 0"),
        ({"rollout": {"temperature": 0.0}}, r"rollout\.temperature: expected > 0"),
        (
            {"rollout": {"max_new_tokens": 10, "max_context_tokens": 10}},
            r"rollout\.max_context_tokens: expected at least 11",
        ),
        ({"training": {"backend": "tourch"}}, r"training\.backend: expected one of .*did you mean 'torch'"),
        (
            {"engine": {"kind": "vlm"}},
            r"engine\.kind: expected one of builtin, scripted, vllm, sglang, found 'vlm'; did you mean 'vllm'\?",
        ),
        ({"streams": [{**STREAM, "runner": "x"}]}, r"streams\[0\]\.runner: expected one of arena, .*, found 'x'"),
        ({"assembly": {"aggregation": "sum"}}, r"assembly\.aggregation: expected one of token_mean, .*, found 'sum'"),
        ({"run": {"id": "a.b"}}, r"run\.id: a run id is"),
        ({"streams": []}, r"streams"),
        ({"streams": [dict(STREAM), dict(STREAM)]}, r"streams"),
        (
            {"sampling": {"max_concurrent_groups": 4, "groups_per_step": 8}},
            r"sampling\.max_concurrent_groups: expected at least 8",
        ),
        # verl#559: sizes that do not divide
        (
            {"sampling": {"groups_per_step": 10}, "assembly": {"mini_batch_groups": 4}},
            r"assembly\.mini_batch_groups = 4 does not divide sampling\.groups_per_step = 10",
        ),
        (
            {"sampling": {"groups_per_step": 8}, "assembly": {"mini_batch_groups": 16}},
            r"assembly\.mini_batch_groups = 16 does not divide sampling\.groups_per_step = 8",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_path(sections: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        decode_config(tree(**sections))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sampling.groups_per_step=4", {"sampling": {"groups_per_step": 4}}),
        ("run.dir=/x/y", {"run": {"dir": "/x/y"}}),
        ("run.id='7'", {"run": {"id": "7"}}),
        ("assembly.estimator.name=rloo", {"assembly": {"estimator": {"name": "rloo"}}}),
        ("engine.urls=['a', 'b']", {"engine": {"urls": ["a", "b"]}}),
        ("streams.a.sampling_weight=2", {"streams": [{**STREAM, "sampling_weight": 2}]}),
        ("streams.0.sampling_weight=2", {"streams": [{**STREAM, "sampling_weight": 2}]}),
    ],
)
def test_an_override_sets_one_value(override: str, expected: dict) -> None:
    config = {"streams": [dict(STREAM)]}
    apply_override(config, override)
    for key, value in expected.items():
        assert config[key] == value


@pytest.mark.parametrize("override", ["sampling", "a..b=1", "=1", "streams.9.x=1", "run.id.x=1"])
def test_an_override_that_names_nothing_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_override({"streams": [dict(STREAM)], "run": {"id": "a"}}, override)


def test_a_file_that_is_no_toml_or_not_there_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "nothing.toml")


def test_only_what_folds_depend_on_changes_their_digest() -> None:
    base = fold_digest(decode_config(tree()))
    assert fold_digest(decode_config(tree(run={"steps": 5}, training={"learning_rate": 0.5}))) == base
    assert fold_digest(decode_config(tree(sampling={"slots_per_group": 4}))) != base
    assert fold_digest(decode_config(tree(assembly={"estimator": {"name": "rloo"}}))) != base


def test_streams_of_a_file_or_a_variable_become_the_configs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = '[[streams]]\nname = "s"\nstream_id = "arena-s"\n'
    (tmp_path / "streams.toml").write_text(listed)
    monkeypatch.setenv("MY_STREAMS", base64.b64encode(listed.encode()).decode())
    for name, given in (
        ("file", f'streams_file = "{tmp_path}/streams.toml"'),
        ("variable", 'streams_env = "MY_STREAMS"'),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text(f'[run]\nid = "r"\n[arena]\nurl = "local"\n{given}\n')
        loaded = load_config(path)
        assert [stream.stream_id for stream in loaded.streams] == ["arena-s"]
        assert (loaded.arena.streams_file, loaded.arena.streams_env) == ("", "")
        again = decode_config(msgspec.to_builtins(loaded))
        (tmp_path / "streams.toml").unlink(missing_ok=True)
        assert list(run_streams(again)) == ["s"]
