"""Pure parts of the clients: events out of bytes, versions onto tokens, questions that are shared."""

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.messages.rollout import FinishReason
from stages.clients.engines.dialect import version_of
from stages.clients.engines.http import EventSplitter, error_of
from stages.clients.engines.labels import Labeller, VersionSpan
from stages.clients.engines.settings import HttpEngineSettings
from stages.clients.engines.sglang import SglangDialect
from stages.clients.engines.watch import VersionWatch
from stages.ports import BadRequestError, ContextOverflowError, EngineUnavailableError


@given(
    st.lists(st.text('{}:,"é0a ', min_size=1, max_size=12).map(str.strip).filter(bool), max_size=6),
    st.lists(st.integers(1, 40)),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_however_their_bytes_are_cut(contents, cuts, newline):
    data = "".join(f"event: x{newline}data: {content}{newline}{newline}" for content in contents).encode()
    splitter, found, start = EventSplitter(), [], 0
    for size in [*cuts, len(data)]:
        found += splitter.feed(data[start : start + size])
        start += size
    assert found == [content.encode() for content in contents]
    assert splitter.empty


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True).map(sorted), st.data())
def test_every_token_gets_its_version_however_late_it_is_known(versions, data):
    """The server samples spans of rising versions; confirmations come in between, each no older than what was sampled."""
    lengths = [data.draw(st.integers(1, 6)) for _ in versions]
    truth = [version for version, length in zip(versions, lengths, strict=True) for _ in range(length)]
    labels, out = Labeller(versions[0]), []
    for number, version in enumerate(truth):
        labels.add([number], [-float(number)])
        if data.draw(st.booleans()):
            later = data.draw(st.sampled_from([v for v in versions if v >= version]))
            chunk = labels.confirm(labels.num_received, later)
            out += [chunk] if chunk is not None else []
    ends = np.cumsum(lengths).tolist()
    spans = [VersionSpan(v, e - n, e) for v, n, e in zip(versions, lengths, ends, strict=True)]
    out += labels.finish(spans, FinishReason.LENGTH, None)
    assert [token for chunk in out for token in chunk.token_ids.tolist()] == list(range(len(truth)))
    assert [chunk.version for chunk in out for _ in chunk.token_ids] == truth
    assert [chunk.finish_reason for chunk in out] == [None] * (len(out) - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize(
    "spans",
    [
        [VersionSpan(0, 0, 2)],
        [VersionSpan(0, 0, 2), VersionSpan(1, 3, 4)],
        [VersionSpan(1, 0, 3)],
        [],
    ],
)
def test_spans_of_another_answer_are_not_believed(spans):
    labels = Labeller(0)
    labels.add([1, 2, 3], [0.0, 0.0, 0.0])
    assert labels.confirm(1, 0) is not None
    with pytest.raises(EngineUnavailableError, match="version"):
        labels.finish(spans, FinishReason.LENGTH, None)


def test_an_aborted_answer_without_a_token_has_one_empty_chunk():
    (chunk,) = Labeller(3).finish([], FinishReason.ABORT, None)
    assert (chunk.version, chunk.token_ids.size, chunk.finish_reason) == (3, 0, FinishReason.ABORT)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (
            400,
            b'{"error": {"message": "exceeds the model\'s maximum context length of 256 tokens"}}',
            ContextOverflowError,
        ),
        (400, b'{"error": {"message": "top_p must be in (0, 1]"}}', BadRequestError),
        (422, b'{"detail": [{"msg": "field required"}]}', BadRequestError),
        (404, b'{"error": {"message": "The model `x` does not exist."}}', EngineUnavailableError),
        (401, b'{"error": "Unauthorized"}', EngineUnavailableError),
        (500, b"Internal Server Error", EngineUnavailableError),
        (503, b"", EngineUnavailableError),
    ],
)
def test_refusals_by_type(status, body, error):
    assert type(error_of(status, body, "engine e")) is error


async def test_many_streams_share_a_question_that_was_asked_after_each_came():
    asked_at: list[int] = []
    clock = 0

    async def ask() -> int:
        asked_at.append(clock)
        await anyio.lowlevel.checkpoint()
        return clock

    watch = VersionWatch(ask, interval_s=0.0)
    found: list[tuple[int, int]] = []

    async def stream() -> None:
        came = clock
        found.append((came, await watch.after_now()))

    async with anyio.create_task_group() as tasks:
        for clock in range(50):  # noqa: B007 - the tasks read it
            tasks.start_soon(stream)
            await anyio.lowlevel.checkpoint()
    assert len(found) == 50
    assert all(version >= came for came, version in found)
    assert len(asked_at) < 50


async def test_a_question_that_fails_or_is_given_up_is_asked_again_by_the_next():
    answers = iter([EngineUnavailableError("away"), 4])

    async def ask() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = VersionWatch(ask, interval_s=0.0)
    with pytest.raises(EngineUnavailableError):
        await watch.after_now()
    assert await watch.after_now() == 4


def test_sglang_repeats_the_last_token_of_an_answer_that_is_aborted_while_it_waits():
    meta = {
        "completion_tokens": 2,
        "weight_version": "3",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    event = msgspec.json.encode({"text": "", "output_ids": [6], "meta_info": meta})
    read = SglangDialect(HttpEngineSettings()).read(event, num_before=2)
    assert (read.ids, read.logprobs, read.finish) == ([], [], FinishReason.ABORT)
    assert read.spans == [VersionSpan(3, 0, 2)]


@pytest.mark.parametrize("label", ["v3", "", "-1", "٣"])
def test_weights_that_something_else_has_labelled_are_not_served(label):
    with pytest.raises(EngineUnavailableError, match="number as the weights' version"):
        version_of(label, 0)
