"""The commands as a person runs them: output, exit codes, and a broker that a replay starts and the others find."""

import json
import shutil

import pytest


def test_inspect_says_what_a_recording_holds(headrace, recorded):
    code, out, _ = headrace("inspect", recorded)
    assert code == 0
    assert "steps 1 to 5" in out
    assert "trajectory.ready" in out
    code, out, _ = headrace("inspect", recorded, "--json", "--verify")
    assert (code, json.loads(out)["damages"]) == (0, [])


def test_inspect_shows_an_episode_and_says_when_there_is_none(headrace, recorded):
    code, out, _ = headrace("inspect", recorded, "g2/0", "--tokens")
    assert code == 0
    assert "assistant: answer 0" in out
    assert "sampled id(log-prob): " in out
    code, out, _ = headrace("inspect", recorded, "g999/0")
    assert code == 1
    assert "is not in" in out


def test_a_damaged_recording_is_an_exit_code_and_a_line(headrace, recorded, tmp_path):
    torn = tmp_path / "torn.hrrec"
    shutil.copy(recorded, torn)
    torn.write_bytes(torn.read_bytes()[:-2000])
    code, _, err = headrace("inspect", torn)
    assert code == 3
    assert "torn tail" in err
    code, _, err = headrace("inspect", tmp_path / "none.hrrec")
    assert code == 1
    assert err.startswith("headrace: ")


@pytest.mark.parametrize("stage", ["reward", "assembly", "training"])
def test_a_diff_without_differences_exits_0(headrace, recorded, stage):
    code, out, _ = headrace("replay", recorded, "--stage", stage, "--diff", "--json")
    found = json.loads(out)
    assert (code, found["differences"]) == (0, 0)
    assert found["compared"] > 0


def test_a_diff_with_differences_exits_1_and_names_them(headrace, recorded):
    changed = "streams.math.reward_threshold=0.9"
    code, out, _ = headrace("replay", recorded, "--stage", "reward", "--diff", "--set", changed)
    assert code == 1
    assert "trajectory.ready g0000003.3" in out
    assert "→" in out


def test_a_replay_needs_to_know_where_to(headrace, recorded):
    assert headrace("replay", recorded)[0] == 2
    assert headrace("replay", recorded, "--diff")[0] == 2
    code, _, err = headrace("replay", recorded, "--url", "nats://127.0.0.1:1", "--speed", "fast")
    assert code == 1
    assert "--speed 'fast'" in err


def test_a_replayed_run_is_recorded_again_the_same(headrace, replayed, recorded, tmp_path):
    code, out, _ = headrace("record", replayed, "-o", tmp_path / "again.hrrec", "--until-end", "--quiet", "--json")
    assert code == 0
    assert json.loads(out)["missing"] == 0
    former = json.loads(headrace("inspect", recorded, "--json")[1])
    now = json.loads(headrace("inspect", tmp_path / "again.hrrec", "--json")[1])
    assert now["topics"] == former["topics"]
    assert now["payloads"] == former["payloads"]


def test_why_tells_from_a_run_and_from_a_recording(headrace, replayed, recorded):
    for source in (replayed, recorded):
        code, out, _ = headrace("why", "g5/2", "--in", source)
        assert code == 0
        assert "trained" in out
    code, out, _ = headrace("why", "g777", "--in", recorded, "--json")
    assert (code, json.loads(out)["fate"]) == (1, "unknown")
    assert headrace("why", "banana", "--in", recorded)[0] == 1


def test_dead_letters_are_listed_shown_retried_and_dropped(headrace, replayed):
    out = headrace("dead", "list", "--in", replayed, "--json")[1]
    first, second = json.loads(out)["letters"][:2]
    assert "refused" in headrace("dead", "show", first["id"], "--in", replayed)[1]
    assert headrace("dead", "retry", first["id"], "--run", replayed)[0] == 0
    assert headrace("dead", "drop", second["id"], "--run", replayed, "--reason", "test")[0] == 0
    everything = json.loads(headrace("dead", "list", "--in", replayed, "--all", "--json")[1])
    states = {one["id"]: one["state"] for one in everything["letters"]}
    assert (everything["damages"], everything["gaps"]) == ([], [])
    assert states[first["id"]] == "retried"
    assert states[second["id"]] == "dropped"
    assert headrace("dead", "retry", "--run", replayed)[0] == 2


def test_prompts_are_published_once(headrace, replayed, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hi", "id": "a"}\n"plain"\n')
    assert (
        json.loads(
            headrace("publish", "prompts", path, "--stream", "new", "--unknown-stream", "--run", replayed, "--json")[1]
        )["published"]
        == 2
    )
    assert (
        "0 published, 2 stood already"
        in headrace("publish", "prompts", path, "--stream", "new", "--unknown-stream", "--run", replayed)[1]
    )
    path.write_text('{"prompt": 3}\n"fine"\n{"prompt": ""}\n')
    code, _, err = headrace("publish", "prompts", path, "--stream", "new", "--unknown-stream", "--run", replayed)
    assert code == 1
    assert "p.jsonl:1" in err
    assert "p.jsonl:3" in err
    code, _, err = headrace("publish", "prompts", path, "--stream", "math", "--run", replayed)
    assert code == 1
    assert "p.jsonl:1" in err
    path.write_text('"fine"\n')
    for stream, reason in (("math", "its tasks are the Arena's"), ("maths", "has no such stream")):
        code, _, err = headrace("publish", "prompts", path, "--stream", stream, "--run", replayed)
        assert code == 1
        assert f"stream '{stream}': " in err
        assert reason in err
    path.write_text('{"prompt": "q", "answer": "42"}\n')
    _, out, err = headrace("publish", "prompts", path, "--stream", "new", "--dry-run", "--json")
    assert json.loads(out) == {"rows": 1, "left_out": {"answer": 1}}
    assert "left out, as a prompt has no such fields: answer (1 row)" in err
    path.write_text('"fine"\n')
    assert "1 rows are fine" in headrace("publish", "prompts", path, "--stream", "new", "--dry-run")[1]


def test_a_tap_that_can_match_nothing_is_refused(headrace, replayed):
    code, _, err = headrace("tap", "episod.ended", "--run", replayed)
    assert code == 1
    assert "did you mean episode.ended" in err
    assert headrace("tap", "--run", replayed)[0] == 1


def test_export_writes_tables(headrace, recorded, tmp_path):
    pytest.importorskip("pyarrow")
    code, out, _ = headrace("export", recorded, tmp_path / "tables", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 5


def test_the_schema_of_one_message(headrace):
    code, out, _ = headrace("schema", "prompt.published")
    assert (code, list(json.loads(out)["topics"])) == (0, ["prompt.published"])
    assert "did you mean" in headrace("schema", "prompt.publish")[2]


@pytest.mark.parametrize(
    "command", ["record", "replay", "inspect", "export", "why", "tap", "schema", "publish prompts", "dead list"]
)
def test_help_shows_examples(headrace, command):
    code, out, _ = headrace(*command.split(), "--help")
    assert code in (0, None)
    assert f"headrace {command}" in out
    assert "Examples" in out
