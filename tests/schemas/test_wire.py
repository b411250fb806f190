from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from schemas.errors import DecodeError, DigestError, NonFiniteError
from schemas.messages.rollout import EpisodeClass, EpisodeEnded
from schemas.messages.sampling import Tick
from schemas.payload import check_payload, inline_ref, run_ref
from schemas.subjects import Topic
from schemas.topics import EPISODE_ENDED, FOLD_TICK, TOPICS, topic_named

GOLDEN = Path(__file__).parent / "golden_messages.json"


def ended(**changes: object) -> EpisodeEnded:
    message = EpisodeEnded(
        group="g0000000",
        slot=0,
        attempt=0,
        stream="s",
        data_id="d",
        session="x",
        outcome=EpisodeClass.SCORED,
        final=True,
        status="DONE",
        score=0.5,
    )
    return msgspec.structs.replace(message, **changes)


def test_golden_bytes_of_every_message_stay_decodable() -> None:
    golden: dict[str, list[str]] = json.loads(GOLDEN.read_text())
    assert set(golden) == {topic.name for topic in TOPICS}, "a new topic needs golden bytes: see golden_messages.py"
    for name, samples in golden.items():
        topic = topic_named(name)
        assert topic is not None
        for sample in samples:
            written = msgspec.msgpack.decode(bytes.fromhex(sample))
            read = msgspec.msgpack.decode(topic.encode(topic.decode(bytes.fromhex(sample))))
            assert {key: read[key] for key in written} == written


# msgspec#486: NaN poisons a log when it is written as null or read back by somebody else
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_number_is_refused_where_it_is_written(bad: float) -> None:
    with pytest.raises(NonFiniteError, match=r"EpisodeEnded\.score"):
        EPISODE_ENDED.encode(ended(score=bad))
    with pytest.raises(NonFiniteError, match=r"turn_rewards\['i1'\]"):
        EPISODE_ENDED.encode(ended(turn_rewards={"i1": bad}))


class _Inner(msgspec.Struct):
    name: str
    value: float | None = None
    children: list[_Inner] = []
    anything: object = None


class _Outer(msgspec.Struct):
    ordinal: int
    inners: list[_Inner]


@pytest.mark.parametrize(
    ("inner", "path"),
    [
        (_Inner(name="a", value=float("nan")), r"_Outer\.inners\[1\]\.value"),
        (_Inner(name="a", children=[_Inner(name="b", value=float("inf"))]), r"inners\[1\]\.children\[0\]\.value"),
        (_Inner(name="a", anything={"x": [float("-inf")]}), r"inners\[1\]\.anything\['x'\]\[0\]"),
    ],
)
def test_a_non_finite_number_is_found_however_deep_it_lies(inner: _Inner, path: str) -> None:
    topic = Topic("deep.numbers", _Outer, lambda outer: (outer.ordinal,), "ordinal")
    with pytest.raises(NonFiniteError, match=path):
        topic.encode(_Outer(ordinal=1, inners=[_Inner(name="fine", value=1.0), inner]))


@pytest.mark.parametrize("score", [None, 0.0, -1.5, 1e300])
def test_finite_values_and_none_come_back_in_both_codecs(score: float | None) -> None:
    message = ended(score=score)
    assert EPISODE_ENDED.decode(EPISODE_ENDED.encode(message)) == message
    assert msgspec.json.decode(msgspec.json.encode(message), type=EpisodeEnded) == message


# msgspec#968: newer writers, foreign messages
def test_fields_of_a_newer_writer_are_ignored() -> None:
    data = msgspec.msgpack.encode({"ordinal": 1, "period_s": 2.0, "unix_time_s": 3.0, "extra": [1, 2]})
    assert FOLD_TICK.decode(data) == Tick(ordinal=1, period_s=2.0, unix_time_s=3.0)


@pytest.mark.parametrize("data", [b"", b"\xff\x00", b"\x80", msgspec.msgpack.encode({"tag": "v9"}), b"\x93" * 4000])
def test_what_is_no_message_of_a_topic_is_refused_with_its_name(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"episode\.ended"):
        EPISODE_ENDED.decode(data)


def test_a_payload_is_checked_against_its_reference() -> None:
    ref = run_ref(b"tokens")
    check_payload(ref, b"tokens")
    with pytest.raises(DigestError, match="expected 6 bytes, found 5"):
        check_payload(ref, b"token")
    with pytest.raises(DigestError, match="checksum"):
        check_payload(ref, b"tokenz")


def test_an_inline_reference_carries_its_bytes_over_the_wire() -> None:
    ref = inline_ref(b"abc")
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=type(ref))
    assert back.inline is not None
    check_payload(back, back.inline)
