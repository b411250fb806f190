"""The warm-up: repeatable, kept, and at the level that was asked for."""

import pytest
from safetensors.torch import load_file
from structlog.testing import capture_logs

from stages.policy.demonstrations import Task, mixed_conversations, right_conversations, shuffled
from stages.policy.tiny import PolicySpec
from stages.policy.tokenizer import TokenizerError
from stages.policy.warmup import WarmUpSettings, warm_policy_folder

TASKS = [Task(turns=("say", "again {reply}"), answer=answer) for answer in ("abc", "bca", "cab")]
SPEC = PolicySpec(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)


def warm(cache, **changes):
    settings = WarmUpSettings(
        **{"skill": 0.2, "target": 1.0, "batch_size": 8, "lr": 0.01, "max_updates": 40, **changes}
    )
    right = right_conversations(TASKS)
    return warm_policy_folder(cache, SPEC, settings, right, mixed_conversations(TASKS, right_share=0.3, seed=0), right)


def test_the_same_inputs_give_the_same_weights_and_are_made_once(tmp_path):
    first, second = warm(tmp_path / "a"), warm(tmp_path / "b")
    assert first.name == second.name
    one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert all(bool((one[name] == other[name]).all()) for name in one)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert warm(tmp_path / "a") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert warm(tmp_path / "a", lr=0.02).name != first.name
    assert not list(tmp_path.glob("*/.part-*"))


def test_it_ends_at_the_level_that_was_asked_for_and_not_far_below(tmp_path):
    target = 0.6
    with capture_logs() as logs:
        warm(tmp_path, skill=0.85, target=target, max_updates=400)
    (said,) = (one for one in logs if one["event"] == "policy warmed up")
    assert said["finished"]
    assert target / 2 < said["answer_probability"] <= target


def test_mixed_answers_keep_their_letters_and_their_share():
    tasks = [Task(turns=("t",), answer="abcd")] * 400
    answers = [conversation[-1]["content"] for conversation in mixed_conversations(tasks, right_share=0.25, seed=1)]
    assert 70 < answers.count("abcd") < 130
    assert {"".join(sorted(answer)) for answer in answers} == {"abcd"}
    assert shuffled("aaa", __import__("random").Random(0)) == "aaa"


def test_a_later_turn_holds_the_reply_to_the_one_before():
    conversation = right_conversations(TASKS[:1])[0]
    assert [m["content"] for m in conversation] == ["say", "abc", "again abc", "abc"]


def test_a_conversation_without_an_answer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="assistant"):
        warm_policy_folder(tmp_path, SPEC, WarmUpSettings(), [[{"role": "user", "content": "x"}]], [], [])
