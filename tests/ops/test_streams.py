"""The rows that a run's config names: listed on the log once, or refused with where the wrong one stands."""

from pathlib import Path

import msgspec
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.config import load_config
from ops.run_folder import Endpoints, RunFolder
from ops.streams import list_streams
from ops.workers.context import WorkerContext
from schemas.errors import ConfigError
from schemas.messages.sampling import StreamRow
from schemas.topics import STREAM_LISTED

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_agent.toml"


@pytest.fixture
def listing(tmp_path, monkeypatch):
    """A worker of a run whose stream has these rows."""
    monkeypatch.chdir(EXAMPLE.parents[1])

    def context(*rows: str) -> WorkerContext:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(f"{row}\n" for row in rows))
        config = load_config(EXAMPLE, [f"streams.vowels.rows={file}"])
        return WorkerContext(RunFolder(tmp_path), config, Endpoints(run="r"), MemoryBroker(MemoryServer(), "r"))

    return context


async def test_rows_are_listed_with_their_prompts_beside_them(listing) -> None:
    context = listing('{"id": "a", "prompt": "one", "tags": ["t"]}', '"two"', '{"data_id": 3, "messages": [{"role": "user", "content": "x"}]}')  # fmt: skip
    await list_streams(context)
    await list_streams(context)  # a worker that was started again
    listed = await context.log.find(STREAM_LISTED, "vowels")
    rows = msgspec.msgpack.decode(await context.payloads.get(listed.rows), type=list[StreamRow])
    assert (listed.num_rows, rows[0].data_id, rows[0].tags, rows[2].data_id) == (3, "a", ["t"], "3")
    assert [bytes(await context.payloads.get(row.payload)) for row in rows[:2]] == [b'"one"', b'"two"']


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (('"x"', '{"prompt": "y", "answer": "42", "level": 1}'), "stream 'vowels': rows.jsonl:2: expected no fields but prompt or messages, id (or data_id) and tags, found answer, level; move"),
        (('{"prompt": "y", "messages": []}',), "stream 'vowels': rows.jsonl:1: expected no fields but prompt or messages"),
        (('{"id": 1, "prompt": "y"}', '{"id": 1, "prompt": "z"}'), "stream 'vowels': rows.jsonl:1 and rows.jsonl:2 both have the id '1'"),
        ((), "stream 'vowels' has weight 1.0 and no rows"),
    ],
)  # fmt: skip
async def test_rows_that_would_lose_something_are_refused_and_none_is_listed(listing, rows, says) -> None:
    context = listing(*rows)
    with pytest.raises(ConfigError) as refused:
        await list_streams(context)
    assert str(refused.value).startswith(says)
    assert await context.log.find(STREAM_LISTED, "vowels") is None
