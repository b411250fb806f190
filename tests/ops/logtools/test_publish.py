import io
import json

import anyio
import msgspec
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.logtools.closing import CloseError, close_stream
from ops.logtools.prompts import PlacedRow, RowError, check_row, read_rows
from ops.logtools.publish import PromptConflictError, Publishing, PublishSettings
from pipeline.log import RunLog
from schemas.errors import ConfigError
from schemas.messages.sampling import StreamRow
from schemas.topics import PROMPT_PUBLISHED, STREAM_LISTED

ROWS = [{"prompt": f"question {number}", "id": f"q{number}", "tags": ["easy"]} for number in range(30)]


def checked(source, **options):
    return [check_row(row) for row in read_rows(str(source), **options)]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def published(broker):
    async with broker.read(["hr.r.prompt.>"], follow=False) as records:
        return [PROMPT_PUBLISHED.decode(record.data) async for record in records]


def publishing(broker, **settings):
    source = settings.pop("source", "")
    return Publishing(broker, PublishSettings(stream="math", **settings), source=source)


def write_table(path, rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path)


def test_every_kind_of_file_gives_the_same_prompts(tmp_path):
    expected = [(prompt.data_id, prompt.prompt, prompt.tags) for prompt in checked(jsonl(tmp_path / "a.jsonl", ROWS))]
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    lines = [f"{row['prompt']},{row['id']},{','.join(row['tags'])}" for row in ROWS]
    (tmp_path / "a.csv").write_text("prompt,id,tags\n" + "\n".join(lines) + "\n")
    write_table(tmp_path / "a.parquet", ROWS)
    for name in ("a.json", "a.csv", "a.parquet"):
        assert [(p.data_id, p.prompt, p.tags) for p in checked(tmp_path / name)] == expected, name
    (tmp_path / "folder").mkdir()
    write_table(tmp_path / "folder" / "data.parquet", ROWS)
    assert [p.data_id for p in checked(tmp_path / "folder")] == [data_id for data_id, _, _ in expected]


def test_rows_come_from_stdin_and_from_a_generator(tmp_path, monkeypatch):
    assert [p.prompt for p in checked("-", stdin=io.BytesIO(b'"one"\n\n"two"\n'))] == [b'"one"', b'"two"']
    (tmp_path / "mytasks.py").write_text("def rows():\n    yield 'one'\n    yield {'prompt': 'two', 'id': 2}\n")
    monkeypatch.chdir(tmp_path)
    assert [p.data_id for p in checked("mytasks:rows")][1] == "2"


def test_a_row_without_an_id_gets_one_from_its_content():
    a, b = (check_row(PlacedRow(place=place, value="the same")) for place in ("a:1", "b:9"))
    assert a.data_id == b.data_id
    assert a.data_id != check_row(PlacedRow(place="a", value="another")).data_id


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": 3}, "expected a string, a list of chat messages or an object, found int"),
        ({"prompt": "  "}, "expected some text"),
        ({"prompt": []}, "at least one chat message"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, r"prompt\[0\]\.role: expected one of assistant"),
        ({"messages": [{"role": "user"}]}, r"prompt\[0\]\.content"),
        ({"prompt": "x", "id": ""}, "id: expected a non-empty string"),
        ({"prompt": "x", "id": True}, "id: expected"),
        ({"prompt": "x", "tags": "easy"}, "tags: expected a list of strings"),
        ({"id": 3}, "expected 'prompt', 'messages' or fields of a task"),
        ({"prompt": {"score": float("nan")}}, "can't be written as JSON"),
        (None, "found NoneType"),
    ],
)
def test_a_wrong_row_is_named_by_its_place(row, words):
    with pytest.raises(RowError, match=words) as raised:
        check_row(PlacedRow(place="train.jsonl:17", value=row))
    assert str(raised.value).startswith("train.jsonl:17: ")


def test_a_line_that_is_no_json_is_named_by_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('"fine"\n{"prompt": \n')
    with pytest.raises(RowError, match=r"a\.jsonl:2: expected one JSON value a line"):
        checked(path)


@pytest.mark.parametrize("source", ["nothing.jsonl", "no.such.module:rows", "a.exe"])
def test_a_source_that_there_is_not_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.exe").write_bytes(b"")
    with pytest.raises(ConfigError):
        checked(source)


async def test_the_same_rows_twice_publish_nothing_new(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    prompts = checked(jsonl(tmp_path / "a.jsonl", ROWS))
    first = await publishing(broker).run(prompts)
    again = await publishing(broker).run(prompts)
    assert (first.published, again.published, again.standing) == (30, 0, 30)
    found = {message.data_id: message for message in await published(broker)}
    assert bytes(found["q3"].prompt.inline) == b'"question 3"'
    assert found["q3"].tags == ["easy"]


async def test_an_interrupted_source_goes_on_where_it_was(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    prompts = checked(jsonl(tmp_path / "a.jsonl", ROWS))
    await publishing(broker, source="digest").run(prompts[:12])
    figures = await publishing(broker, source="digest").run(prompts)
    assert (figures.skipped, figures.published, figures.standing) == (12, 18, 0)


async def test_another_prompt_under_the_same_id_is_a_conflict():
    broker = MemoryBroker(MemoryServer(), "r")
    rows = [PlacedRow(place=f"a:{n}", value={"prompt": f"text {n}", "id": "same"}) for n in (1, 2)]
    with pytest.raises(ExceptionGroup) as raised:
        await publishing(broker).run([check_row(row) for row in rows])
    assert raised.group_contains(PromptConflictError, match=r"a:\d: another prompt stands under the id 'same'")


async def test_a_stream_is_listed_with_its_rows_in_order(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    prompts = checked(jsonl(tmp_path / "a.jsonl", ROWS))
    await publishing(broker, list_stream=True, weight=2.0, tags=("v1",)).run(prompts)
    listed = await RunLog(broker).find(STREAM_LISTED, "math")
    rows = msgspec.msgpack.decode(await broker.payloads.get(listed.rows), type=list[StreamRow])
    assert (listed.weight, [row.data_id for row in rows]) == (2.0, [row["id"] for row in ROWS])
    assert rows[0].tags == ["easy", "v1"]
    assert bytes(await broker.payloads.get(rows[4].payload)) == b'"question 4"'
    figures = await publishing(broker, list_stream=True, weight=2.0, tags=("v1",)).run(prompts)
    assert figures.published == 0


async def test_a_rate_is_kept():
    broker = MemoryBroker(MemoryServer(), "r")
    prompts = [check_row(PlacedRow(place="a", value=f"text {n}")) for n in range(11)]
    started = anyio.current_time()
    await publishing(broker, per_second=100.0).run(prompts)
    assert anyio.current_time() - started >= 0.09


async def test_a_stream_that_any_client_published_into_is_closed_with_its_rows_in_the_order_of_the_log(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    await publishing(broker).run(checked(jsonl(tmp_path / "a.jsonl", ROWS[10:])))
    await broker.publish("hr.r.prompt.published.math.foreign", b"\xc1")
    await publishing(broker).run(checked(jsonl(tmp_path / "b.jsonl", ROWS)))
    figures = await close_stream(broker, "math", weight=2.0)
    assert (figures.rows, figures.undecodable, figures.stood_already) == (30, 1, False)
    listed = await RunLog(broker).find(STREAM_LISTED, "math")
    assert (listed.num_rows, listed.weight) == (30, 2.0)
    rows = msgspec.msgpack.decode(await broker.payloads.get(listed.rows), type=list[StreamRow])
    order = [message.data_id for message in await published_prompts(broker)]
    assert [row.data_id for row in rows] == order
    assert json.loads(bytes(await broker.payloads.get(rows[0].payload))) == f"question {order[0].removeprefix('q')}"
    assert (await close_stream(broker, "math", weight=2.0)).stood_already


async def published_prompts(broker):
    async with broker.read(["hr.r.prompt.>"], follow=False) as records:
        return [PROMPT_PUBLISHED.decode(record.data) async for record in records if record.data != b"\xc1"]


async def test_a_stream_without_prompts_or_closed_otherwise_is_not_closed(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    with pytest.raises(CloseError, match="found none"):
        await close_stream(broker, "math", weight=1.0)
    await publishing(broker).run(checked(jsonl(tmp_path / "a.jsonl", ROWS)))
    await close_stream(broker, "math", weight=1.0)
    with pytest.raises(CloseError, match="listed already"):
        await close_stream(broker, "math", weight=3.0)
