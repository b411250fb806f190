import json

import msgspec
import pytest

from ops.logtools.export import export_tables
from ops.logtools.inspecting import conversations, summary
from ops.logtools.message_docs import markdown, schema_document
from ops.logtools.names import parse_name
from ops.logtools.sources import FileSource, LiveSource
from schemas.errors import ConfigError
from schemas.messages.rollout import InteractionTokens
from schemas.topics import INTERACTION_RECORDED, TOPICS


def test_a_summary_counts_what_is_there(chaotic, recording):
    found = summary(recording)
    assert found.messages == found.last_sequence == sum(topic.messages for topic in found.topics.values())
    assert found.steps == sorted(chaotic.digests)
    assert (found.gaps, found.damages, found.missing_payloads, found.closed) == ([], [], 0, True)


def test_an_episode_reads_as_a_conversation_with_all_its_tokens(recording):
    (found,) = conversations(recording, parse_name("g2/0"))
    calls = [call for attempt in found.attempts for call in attempt.calls]
    assert calls
    records = [
        INTERACTION_RECORDED.decode(record.data)
        for record in recording.records(["hr.r.interaction.recorded.>"])
        if record.subject.split(".")[4].startswith("g0000002-0-")
    ]
    for call, record in zip(calls, records, strict=True):
        tokens = msgspec.msgpack.decode(recording.payload(record.tokens), type=InteractionTokens)
        assert call.completion_ids == tokens.completion_ids.as_numpy().tolist()
        assert call.logprobs == tokens.logprobs.as_numpy().tolist()
        assert call.messages[0]["role"] == "user"


async def test_tables_hold_what_the_log_holds(chaotic, recording, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    counts = await export_tables(FileSource(recording), tmp_path)
    topics = recording.topics()
    assert counts["interactions"] == topics["interaction.recorded"].messages
    assert counts["steps"] == topics["step.assembled"].messages
    episodes = pq.read_table(tmp_path / "episodes.parquet").to_pylist()
    rewarded = {(row["group"], row["slot"]) for row in episodes if row["reward"] is not None}
    assert len(rewarded) == len([row for row in episodes if row["rejected"] is False])
    ended = [row for row in episodes if row["session"] is not None]
    assert {row["harness"] for row in ended} == {"", "math-loop@1", "words-loop@1"}
    assert all(row["harness"] == (f"{row['stream']}-loop@1" if row["session"] else "") for row in ended)
    steps = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert {row["step"]: row["digest"] for row in steps} == chaotic.digests
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(rows) == sum(row["num_rows"] for row in steps)
    assert await export_tables(LiveSource(chaotic.broker), tmp_path / "live") == counts


async def test_a_table_that_there_is_not_is_refused(recording, tmp_path):
    with pytest.raises(ConfigError, match="expected episodes, interactions, rows, steps"):
        await export_tables(FileSource(recording), tmp_path, ["tokens"])


def test_the_documented_messages_are_those_of_the_code(pytestconfig):
    path = pytestconfig.rootpath / "docs" / "messages.md"
    assert path.read_text(encoding="utf-8") == markdown(), "headrace schema --markdown > docs/messages.md"


def test_every_topic_has_a_schema():
    document = json.loads(json.dumps(schema_document()))
    assert set(document["topics"]) == {topic.name for topic in TOPICS}
    prompt = document["topics"]["prompt.published"]
    assert prompt["subject"] == "hr.{run}.prompt.published.{stream}.{data_id}"
    assert prompt["schema"]["$defs"]["PromptPublished"]["required"] == ["stream", "data_id", "prompt"]
