import io
import json

import anyio
import msgspec
import pytest
from synthetic import config_tree

from broker.memory import MemoryBroker, MemoryServer
from ops.config import decode_config
from ops.logtools.closing import CloseError, close_stream
from ops.logtools.prompt_streams import NoPromptStreamError, check_prompt_stream
from ops.logtools.prompts import PlacedRow, RowError, check_row, read_rows
from ops.logtools.publish import PromptConflictError, Publishing, PublishSettings
from pipeline.log import RunLog
from schemas.errors import ConfigError
from schemas.messages.sampling import RunStarted, StreamRow
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
        ({"id": 3}, "expected the fields prompt or messages"),
        ({"prompt": {}}, "expected an object with some fields"),
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


@pytest.mark.parametrize("value", [{"promt": "x", "id": "1"}, {"id": 3}])
def test_a_row_without_a_prompt_names_its_fields_and_what_is_expected(value):
    with pytest.raises(RowError, match=r"a:1: expected the fields prompt or messages.*found .*id") as raised:
        check_row(PlacedRow(place="a:1", value=value))
    assert all(name in str(raised.value) for name in value)


def test_a_table_with_a_wrong_header_is_refused_once(tmp_path):
    (tmp_path / "a.csv").write_text("promt,id\nhello,1\nyou,2\n")
    write_table(tmp_path / "a.parquet", [{"question": "hello", "answer": "1"}])
    with pytest.raises(RowError, match=r"a\.csv: expected columns prompt or messages.*found promt, id"):
        checked(tmp_path / "a.csv")
    with pytest.raises(RowError, match=r"a\.parquet: expected columns prompt or messages.*found question, answer"):
        checked(tmp_path / "a.parquet")


def test_what_a_prompt_has_no_place_for_is_named():
    row = PlacedRow(place="a:1", value={"prompt": "q", "answer": "42", "id": "e1", "tags": [], "messages": []})
    assert check_row(row).left_out == ["answer", "messages"]
    assert check_row(PlacedRow(place="a:1", value={"prompt": {"question": "q", "answer": "42"}})).left_out == []


def test_a_null_id_is_as_no_id(tmp_path):
    ids = {check_row(PlacedRow(place="a", value=v)).data_id for v in ({"prompt": "x", "id": None}, {"prompt": "x"})}
    assert len(ids) == 1
    (tmp_path / "a.csv").write_text("id,prompt\n,x\n")
    assert {prompt.data_id for prompt in checked(tmp_path / "a.csv")} == ids


@pytest.mark.parametrize("value", [{"prompt": "x", "id": "\ud800"}, {"prompt": "x", "tags": ["\ud800"]}, "\ud800"])
def test_half_a_surrogate_pair_is_no_text(value):
    with pytest.raises(RowError, match=r"a:1: "):
        check_row(PlacedRow(place="a:1", value=value))


def hub(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(folder / name, [{"prompt": name, "id": name}])
    return folder


def ids(folder, split=""):
    return [check_row(row).data_id for row in read_rows(str(folder), split=split)]


def test_a_folder_with_splits_gives_one_of_them(tmp_path):
    names = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"]
    folder = hub(tmp_path, *names, "data/held_out-00000-of-00001.jsonl", ".cache/train.jsonl", "dataset_infos.json")
    assert ids(folder) == names[:2]
    assert ids(folder, "test") == names[2:]
    assert ids(folder, "held_out") == ["data/held_out-00000-of-00001.jsonl"]
    with pytest.raises(
        ConfigError, match=r"splits held_out, test, train, found no 'validation': choose one by --split"
    ):
        ids(folder, "validation")


def test_a_file_that_is_called_dataset_is_not_passed_over(tmp_path):
    assert ids(hub(tmp_path / "a", "dataset_train.jsonl")) == ["dataset_train.jsonl"]
    assert ids(hub(tmp_path / "b", "dataset_1.jsonl", "more.jsonl")) == ["dataset_1.jsonl", "more.jsonl"]


def test_a_folder_of_another_split_only_wants_it_named(tmp_path):
    with pytest.raises(ConfigError, match="splits validation, found no 'train'"):
        ids(hub(tmp_path, "dev.jsonl"))
    assert ids(tmp_path, "dev") == ["dev.jsonl"]


def test_files_of_no_split_beside_some_of_one_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"extra\.jsonl belongs to no split, other files to train"):
        ids(hub(tmp_path, "train.jsonl", "extra.jsonl"))


def test_a_split_of_what_has_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none of its 1 files is named after a split"):
        ids(hub(tmp_path / "a", "rows.jsonl"), "test")
    with pytest.raises(ConfigError, match="only a folder has splits"):
        ids(tmp_path / "a" / "rows.jsonl", "test")


def saved(folder, name):
    arrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table = arrow.Table.from_pylist([{"prompt": name, "id": name}])
    with (folder / "data-00000-of-00001.arrow").open("wb") as file, arrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_dict_gives_one_split(tmp_path):
    for name in ("train", "test"):
        saved(tmp_path / name, name)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert (ids(tmp_path), ids(tmp_path, "test"), ids(tmp_path / "test")) == (["train"], ["test"], ["test"])
    with pytest.raises(ConfigError, match="splits test, train, found no 'dev'"):
        ids(tmp_path, "dev")


async def started(*streams):
    broker = MemoryBroker(MemoryServer(), "r")
    tree = config_tree()
    tree["streams"] = [*tree["streams"], *streams]
    config = msgspec.json.encode(decode_config(tree))
    await RunLog(broker).publish(RunStarted(ordinal=0, config_json=config, config_digest="d", headrace_version="0.1.0"))
    return broker


OPEN = {"name": "tickets", "stream_id": "t", "runner": "function", "agent": "m.n:f", "open": True}
FIXED = {"name": "fixed", "stream_id": "f", "runner": "function", "agent": "m.n:f", "rows": "a.jsonl"}


async def test_only_a_stream_that_takes_prompts_is_published_into():
    broker = await started(OPEN, FIXED)
    await check_prompt_stream(broker, "tickets")
    known = "streams that take prompts: tickets; others: fixed, math, words"
    for name, reason in (("math", "the Arena's"), ("fixed", r"rows = 'a\.jsonl'"), ("ticket", "has no such stream")):
        with pytest.raises(NoPromptStreamError, match=f"stream '{name}': .*{reason}.*; {known}"):
            await check_prompt_stream(broker, name)
    await check_prompt_stream(broker, "ticket", allow_unknown=True)
    with pytest.raises(NoPromptStreamError):
        await check_prompt_stream(broker, "math", allow_unknown=True)


async def test_a_closed_stream_takes_no_more(tmp_path):
    broker = await started(OPEN)
    rows = [check_row(PlacedRow(place="a", value="one"))]
    await Publishing(broker, PublishSettings(stream="tickets")).run(rows)
    await close_stream(broker, "tickets", weight=1.0)
    with pytest.raises(NoPromptStreamError, match="'tickets' is closed with 1 rows"):
        await check_prompt_stream(broker, "tickets")
    await check_prompt_stream(broker, "tickets", lists=True)


async def test_a_run_that_was_never_started_takes_every_stream():
    await check_prompt_stream(MemoryBroker(MemoryServer(), "r"), "anything")
