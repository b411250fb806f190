import msgspec
import pytest

from broker.recording import Redactor, parse_rule
from broker.recording.redaction import mask_text
from schemas import arrays
from schemas.errors import ConfigError
from schemas.messages.rollout import EpisodeClass, EpisodeEnded, FinishReason, InteractionRecorded, InteractionTokens
from schemas.payload import check_payload, inline_ref, run_ref
from schemas.topics import EPISODE_ENDED, INTERACTION_RECORDED

TOKENS = msgspec.msgpack.encode(
    InteractionTokens(
        prompt_ids=arrays.int32([1, 2]),
        completion_ids=arrays.int32([3]),
        logprobs=arrays.float32([-0.5]),
        versions=arrays.runs([0]),
        messages_json=b'[{"role":"user","content":"my api_key=abcd1234efgh"}]',
    )
)


def call(ref):
    return InteractionRecorded(
        session="g0000001-0-0-0", ordinal=0, interaction_id="c", parent=None, tokens=ref, num_context=0, num_prompt=2,
        num_completion=1, min_version=0, max_version=0, finish_reason=FinishReason.STOP,
    )  # fmt: skip


def ended(**changes):
    return EpisodeEnded(
        group="g0000001", slot=0, attempt=0, stream="s", data_id="d", session="", outcome=EpisodeClass.SYSTEM, final=True,
        status="FAILED", **changes,
    )  # fmt: skip


@pytest.mark.parametrize("inline", [True, False])
def test_a_rule_reaches_through_a_payload_and_keeps_the_tokens(inline):
    redactor = Redactor([parse_rule("interaction.recorded.tokens.messages_json=drop")])
    ref = inline_ref(TOKENS) if inline else run_ref(TOKENS)
    now = redactor.message(INTERACTION_RECORDED, call(ref), lambda _: memoryview(TOKENS))
    data = now.tokens.inline if inline else dict(redactor.payloads)[now.tokens.id]
    check_payload(now.tokens, data)
    content = msgspec.msgpack.decode(data, type=InteractionTokens)
    assert content.messages_json == b""
    assert content.completion_ids.as_numpy().tolist() == [3]


def test_the_rule_for_secrets_masks_them_in_messages_and_payloads():
    redactor = Redactor([parse_rule("secrets")])
    now = redactor.message(INTERACTION_RECORDED, call(run_ref(TOKENS)), lambda _: memoryview(TOKENS))
    ((_, data),) = redactor.payloads
    assert now.tokens.id != run_ref(TOKENS).id
    assert b"abcd1234" not in data
    assert b"my api_key=***" in data
    failed = redactor.message(EPISODE_ENDED, ended(error="401 for Bearer abcdefgh"), lambda _: None)
    assert failed.error == "401 for Bearer ***"


def test_a_message_without_secrets_stays_the_same_object():
    message = ended(error="no disk")
    assert Redactor([parse_rule("secrets")]).message(EPISODE_ENDED, message, lambda _: None) is message


@pytest.mark.parametrize(("action", "expected"), [("drop", ""), ("mask", "***"), ("hash", "xxh3:")])
def test_a_field_is_dropped_masked_or_hashed(action, expected):
    rule = parse_rule(f"episode.ended.error={action}")
    now = Redactor([rule]).message(EPISODE_ENDED, ended(error="no disk"), lambda _: None)
    assert now.error.startswith(expected)
    assert "disk" not in now.error


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("episode.ended.eror=drop", "has no field 'eror'"),
        ("episode.endet.error=drop", "there is no topic 'episode.endet'"),
        ("episode.ended.error=burn", "expected 'topic.field=drop'"),
        ("trajectory.ready.rows.tokens=drop", "named by their content"),
    ],
)
def test_a_rule_that_can_do_nothing_is_refused(rule, words):
    with pytest.raises(ConfigError, match=words):
        parse_rule(rule)


def test_a_password_inside_a_url_is_masked():
    assert mask_text("nats://user:pass@host:4222") == "nats://***@host:4222"
