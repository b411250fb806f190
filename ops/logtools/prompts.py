"""Where prompts come from, and what a row must look like: JSONL, JSON, Parquet, CSV, a `datasets` folder, stdin, a generator.

A row is a string (the prompt itself), or an object with `prompt` (a string, a list of chat messages, or an object for the
stream's runner), or with `messages`; optional `id` (or `data_id`) and `tags`. Other fields are not published: whoever reads
rows is told of them. A row without an id gets one from its content, so the same row is the same prompt wherever it stands.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ops.logtools.dataset_folders import folder_files
from schemas.errors import ConfigError
from schemas.payload import digest

_IDS: Final = ("data_id", "id")
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_BATCH_ROWS: Final = 512
_ID_LIMIT: Final = 128

RowValue = None | bool | int | float | str | list["RowValue"] | dict[str, "RowValue"]


class RowError(ConfigError):
    """A row that can't be published, with where it stands."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A checked row."""

    place: str
    """Where it stands: `file.jsonl:17`."""
    data_id: str
    prompt: bytes
    """JSON."""
    tags: list[str]
    left_out: list[str] = []
    """Fields of the row that no prompt has."""


class PlacedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as it was read."""

    place: str
    value: object


def read_rows(source: str, *, split: str = "", stdin: BinaryIO | None = None) -> Iterator[PlacedRow]:
    """The rows of a source: a file, a folder, `-` for stdin, or `package.module:generator`.

    Args:
        split: of a folder that has several; empty = `train`.

    Raises:
        ConfigError: the source can't be read.
        RowError: a line that is no JSON.
    """
    path = Path(source).expanduser()
    if split and not path.is_dir():
        raise ConfigError(f"{source}: --split {split}: only a folder has splits")
    if source == "-":
        yield from _jsonl(stdin or sys.stdin.buffer, "stdin")
        return
    if path.is_dir():
        for found in folder_files(path, split):
            yield from _file(found)
    elif path.is_file():
        yield from _file(path)
    elif ":" in source and not path.exists():
        yield from _generator(source)
    else:
        raise ConfigError(
            f"{source}: expected a .jsonl, .json, .csv or .parquet file, a folder of a dataset, '-' for stdin, or "
            "package.module:generator; found nothing of that name"
        )


def _file(path: Path) -> Iterator[PlacedRow]:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson" | ".txt":
            with path.open("rb") as file:
                yield from _jsonl(file, path.name)
        case ".json":
            yield from _json(path)
        case ".csv" | ".tsv":
            yield from _csv(path)
        case ".parquet" | ".arrow":
            yield from _table(path)
        case _:
            raise ConfigError(f"{path}: expected .jsonl, .json, .csv, .tsv, .parquet or .arrow, found {path.suffix!r}")


def _jsonl(file: BinaryIO, name: str) -> Iterator[PlacedRow]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            yield PlacedRow(place=place, value=json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RowError(f"{place}: expected one JSON value a line, found: {error}") from error


def _json(path: Path) -> Iterator[PlacedRow]:
    try:
        values: object = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RowError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, list):
        raise RowError(f"{path}: expected a JSON list of rows, found {type(values).__name__}; one row a line is .jsonl")
    items: list[object] = values
    for number, value in enumerate(items):
        yield PlacedRow(place=f"{path.name}[{number}]", value=value)


def _csv(path: Path) -> Iterator[PlacedRow]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            _check_columns(path, reader.fieldnames or ())
            for row in reader:
                place = f"{path.name}:{reader.line_num}"
                if None in row or None in row.values():
                    raise RowError(f"{place}: expected {len(reader.fieldnames or ())} columns, found another number")
                value: dict[str, object] = dict(row)
                for name in _IDS:
                    value[name] = value.get(name) or None  # CSV has no null
                if isinstance(value.get("tags"), str):
                    value["tags"] = [tag for tag in str(value["tags"]).split(",") if tag]
                yield PlacedRow(place=place, value=value)
        except (csv.Error, UnicodeDecodeError) as error:
            raise RowError(f"{path.name}:{reader.line_num}: not CSV: {error}") from error


def _table(path: Path) -> Iterator[PlacedRow]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra that only tables need
        import pyarrow.parquet as pq  # noqa: PLC0415 - same
    except ImportError as error:
        raise ConfigError(f"{path}: tables need pyarrow: pip install 'headrace[tables]'") from error
    number = 0
    try:
        if path.suffix.lower() == ".parquet":
            batches: Iterable[pa.RecordBatch] = pq.ParquetFile(path).iter_batches(batch_size=_BATCH_ROWS)
        else:
            with path.open("rb") as file:
                batches = pa.ipc.open_stream(io.BytesIO(file.read()))
        for batch in batches:
            _check_columns(path, batch.schema.names)
            for value in batch.to_pylist():
                yield PlacedRow(place=f"{path.name} row {number}", value=value)
                number += 1
    except pa.ArrowException as error:
        raise ConfigError(f"{path}: can't be read as a table: {error}") from error


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    if not {"prompt", "messages"} & set(columns):
        raise RowError(f"{path.name}: {_no_prompt(columns, 'columns')}")


def _no_prompt(found: Sequence[str], what: str) -> str:
    return (
        f"expected {what} prompt or messages, with id (or data_id) and tags as one likes, found "
        f"{', '.join(found) or 'none'}; an object for the stream's runner stands inside prompt"
    )


def _generator(source: str) -> Iterator[PlacedRow]:
    module, _, name = source.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source}: can't be imported: {error}; expected package.module:generator") from error
    finally:
        sys.path.pop(0)
    rows: object = made() if callable(made) else made
    if not isinstance(rows, Iterable):
        raise ConfigError(f"{source}: expected a generator function or an iterable, found {type(rows).__name__}")
    items: Iterable[object] = rows
    for number, value in enumerate(items):
        yield PlacedRow(place=f"{source} item {number}", value=value)


def check_row(row: PlacedRow, *, check: Callable[[object], str] | None = None) -> Prompt:
    """The row as it will be published.

    Args:
        check: a further test of the prompt, which returns what is wrong or nothing.

    Raises:
        RowError: what is wrong, and where.
    """
    value = row.value
    data_id, tags, left_out = "", list[str](), list[str]()
    prompt: object = value
    if isinstance(value, dict):
        fields: dict[str, object] = value
        used = "prompt" if "prompt" in fields else "messages"
        if used not in fields:
            raise RowError(f"{row.place}: {_no_prompt([str(name) for name in fields], 'the fields')}")
        data_id = _id(row, fields)
        tags = _tags(row, fields)
        prompt = fields[used]
        left_out = [str(name) for name in fields if name not in (*_IDS, "tags", used)]
    _check_prompt(row, prompt)
    wrong = check(prompt) if check is not None else ""
    if wrong:
        raise RowError(f"{row.place}: {wrong}")
    try:
        encoded = json.dumps(prompt, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{row.place}: the prompt can't be written as JSON: {error}") from error
    data_id = data_id or f"x{digest(encoded)}"
    return Prompt(place=row.place, data_id=data_id, prompt=encoded, tags=tags, left_out=left_out)


def _id(row: PlacedRow, fields: dict[str, object]) -> str:
    for name in _IDS:
        value = fields.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
                raise RowError(f"{row.place}: {name}: expected a non-empty string or a whole number, found {value!r}")
            if len(str(value)) > _ID_LIMIT:
                raise RowError(f"{row.place}: {name}: expected at most {_ID_LIMIT} characters, found {len(str(value))}")
            return _text(row, name, str(value))
    return ""


def _text(row: PlacedRow, name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{row.place}: {name}: {text!r} is no text: {error}") from error
    return text


def _tags(row: PlacedRow, fields: dict[str, object]) -> list[str]:
    value = fields.get("tags")
    if value is None:
        return []
    items: list[object] = value if isinstance(value, list) else [None]
    tags = [_text(row, "tags", item) for item in items if isinstance(item, str)]
    if len(tags) != len(items):
        raise RowError(f"{row.place}: tags: expected a list of strings, found {value!r}")
    return tags


def _check_prompt(row: PlacedRow, prompt: object) -> None:
    match prompt:
        case str():
            if not prompt.strip():
                raise RowError(f"{row.place}: prompt: expected some text, found {prompt!r}")
        case list():
            messages: list[object] = prompt
            if not messages:
                raise RowError(f"{row.place}: prompt: expected at least one chat message, found an empty list")
            for number, message in enumerate(messages):
                _check_message(row, number, message)
        case dict():
            if not prompt:
                raise RowError(f"{row.place}: prompt: expected an object with some fields, found an empty one")
        case _:
            raise RowError(
                f"{row.place}: prompt: expected a string, a list of chat messages or an object, found "
                f"{type(prompt).__name__}"
            )


def _check_message(row: PlacedRow, number: int, message: object) -> None:
    where = f"{row.place}: prompt[{number}]"
    if not isinstance(message, dict):
        raise RowError(f"{where}: expected a chat message with role and content, found {type(message).__name__}")
    fields: dict[str, object] = message
    role = fields.get("role")
    if role not in _ROLES:
        raise RowError(f"{where}.role: expected one of {', '.join(sorted(_ROLES))}, found {role!r}")
    content = fields.get("content")
    if not isinstance(content, (str, list)) and not (content is None and fields.get("tool_calls")):
        raise RowError(f"{where}.content: expected a string or a list of parts, found {type(content).__name__}")
