"""What the Arena answers, read strictly: envelopes, pages, results. Pure; every breach is a typed error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import msgspec

from schemas.config_arena import RewardRef
from stages.clients.arena.errors import ArenaContractError, DatasetPagingError, TaskResultError

Json = dict[str, object]
SUCCESS_STATUSES = frozenset(("DONE", "OK"))
FAILED_STATUSES = frozenset((
    "CANCELLED", "COLLECT_FAILED", "EVAL_FAILED", "FAILED", "HARNESS_FAILED", "NO_OUTPUT", "SETUP_FAILED", "TIMEOUT",
))  # fmt: skip
TERMINAL_STATUSES = SUCCESS_STATUSES | FAILED_STATUSES
ENVELOPES = ("result", "output", "task", "data")
MAX_ENVELOPE_DEPTH = 4
MAX_PAGE_ROWS = 1000
_RESULT_FIELDS = ("status", "score", "task_id")


class VersionedRef(msgspec.Struct, frozen=True, kw_only=True):
    """A harness or a reward in one version."""

    key: str
    version: str

    def __str__(self) -> str:
        return f"{self.key}@{self.version}"


class ArenaStream(msgspec.Struct, frozen=True, kw_only=True):
    """A live stream."""

    stream_id: str
    status: str | None
    harness: VersionedRef | None
    reward: VersionedRef | None


class DatasetRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a stream."""

    data_id: str
    tags: tuple[str, ...]

    @property
    def task_type(self) -> str:
        """The one `domain:` tag, else `unknown`."""
        return task_type(self.tags)


class DatasetPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a dataset, checked by itself."""

    rows: tuple[DatasetRow, ...]
    total: int


class StreamTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task in a stream's history."""

    status: str
    harness: VersionedRef | None
    reward: VersionedRef | None


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task stands; terminal or not."""

    task_id: str
    status: str
    score: float | None
    """Only what stands at the top level under that name; never searched for elsewhere."""
    raw: object
    artifacts_uri: str | None
    trace_id: str | None
    computed_at: str | None

    @property
    def terminal(self) -> bool:
        """Whether nothing more will come."""
        return self.status in TERMINAL_STATUSES


def is_json(value: object) -> TypeGuard[Json]:
    """Whether a decoded value is a JSON object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object]]:
    """Whether a decoded value is a JSON list."""
    return isinstance(value, list)


def shown(value: object) -> str:
    """A foreign value as an error may quote it: short."""
    return repr(value)[:80]


def read_stream(answer: object, stream_id: str) -> ArenaStream:
    """A stream, bare or as {data: {…}} or {data: {stream: {…}}}.

    Raises:
        ArenaContractError: No stream, another stream, or one that is not ACTIVE.
    """
    value = answer
    for name in ("data", "stream"):
        if is_json(value) and "stream_id" not in value and name in value:
            value = value[name]
    if not is_json(value):
        raise ArenaContractError(f"stream {stream_id!r}: expected an object with stream_id, found {shown(answer)}")
    stream = stream_fields(value)
    if stream.stream_id != stream_id:
        raise ArenaContractError(f"stream {stream_id!r}: the Arena answered with stream {shown(stream.stream_id)}")
    if stream.status is not None and stream.status != "ACTIVE":
        raise ArenaContractError(f"stream {stream_id!r}: status is {shown(stream.status)}, expected 'ACTIVE'")
    return stream


def stream_fields(value: Mapping[str, object]) -> ArenaStream:
    """A stream's own object, unchecked but for its types.

    Raises:
        ArenaContractError: stream_id is no text.
    """
    stream_id = value.get("stream_id")
    if not isinstance(stream_id, str):
        raise ArenaContractError(f"stream: expected stream_id as text, found {shown(stream_id)}")
    status = value.get("status")
    return ArenaStream(
        stream_id=stream_id,
        status=None if status is None else str(status),
        harness=read_ref(value.get("default_harness_ref")),
        reward=read_ref(value.get("default_reward_ref")),
    )


def read_streams(answer: object) -> list[ArenaStream]:
    """The list of streams.

    Raises:
        ArenaContractError: It is no list of objects.
    """
    items = items_of(answer)
    if items is None:
        raise ArenaContractError(f"streams: expected an object with a list 'items', found {shown(answer)}")
    return [stream_fields(item) for item in items if is_json(item)]


def read_ref(value: object) -> VersionedRef | None:
    """A {key, version} object, or None where either is missing."""
    if not is_json(value):
        return None
    key, version = value.get("key"), value.get("version")
    if key in (None, "") or version in (None, ""):
        return None
    return VersionedRef(key=str(key), version=str(version))


def items_of(answer: object) -> list[object] | None:
    """The list in {items: […]}, {data: […]}, {data: {items: […]}} or a bare list."""
    value = answer
    for name in ("data", "items"):
        if is_json(value) and name in value:
            value = value[name]
    return value if is_list(value) else None


def read_tasks(answer: object, stream_id: str) -> list[StreamTask]:
    """A stream's latest tasks, items of {task: {…}} or bare.

    Raises:
        ArenaContractError: It is no list of tasks.
    """
    items = items_of(answer)
    if items is None:
        raise ArenaContractError(f"stream {stream_id!r} tasks: expected a list, found {shown(answer)}")
    tasks: list[StreamTask] = []
    for item in items:
        task = item.get("task", item) if is_json(item) else item
        if not is_json(task) or not isinstance(task.get("status"), str):
            raise ArenaContractError(f"stream {stream_id!r} tasks: expected a task with a status, found {shown(item)}")
        refs = (read_ref(task.get("harness_ref")), read_ref(task.get("reward_ref")))
        tasks.append(StreamTask(status=str(task["status"]), harness=refs[0], reward=refs[1]))
    return tasks


def read_page(answer: object, *, stream_id: str, offset: int, limit: int) -> DatasetPage:
    """One page of a dataset.

    Raises:
        DatasetPagingError: Names stream, page and values.
    """
    where = f"stream {stream_id!r} dataset page offset={offset} limit={limit}"
    value = answer.get("data", answer) if is_json(answer) and "data_ids" not in answer else answer
    if not is_json(value):
        raise DatasetPagingError(f"{where}: expected an object with data_ids, found {shown(answer)}")
    total = value.get("total")
    if not isinstance(total, int) or isinstance(total, bool) or total <= 0:
        raise DatasetPagingError(f"{where}: total is {shown(total)}, expected a whole number > 0")
    ids = _data_ids(value.get("data_ids"), where)
    for name, expected in (("offset", offset), ("limit", limit), ("count", len(ids))):
        found = value.get(name)
        if found != expected or isinstance(found, bool):
            raise DatasetPagingError(f"{where}: {name} is {shown(found)}, expected {expected}")
    if len(ids) > limit:
        raise DatasetPagingError(f"{where}: it holds {len(ids)} data_ids, expected at most {limit}")
    tags = _item_tags(value.get("items"), ids, where)
    rows = tuple(DatasetRow(data_id=i, tags=t) for i, t in zip(ids, tags, strict=True))
    return DatasetPage(rows=rows, total=total)


def join_pages(stream_id: str, total: int, pages: Sequence[DatasetPage]) -> list[DatasetRow]:
    """All rows, in order.

    Raises:
        DatasetPagingError: The total changed, an id came twice, or the pages don't add up to the total.
    """
    rows: list[DatasetRow] = []
    first_page: dict[str, int] = {}
    for number, page in enumerate(pages):
        where = f"stream {stream_id!r} dataset page {number}"
        if page.total != total:
            raise DatasetPagingError(f"{where}: total is {page.total}, it was {total} before; list the stream again")
        for row in page.rows:
            if row.data_id in first_page:
                found = f"data_id {row.data_id!r} stands on page {first_page[row.data_id]} too"
                raise DatasetPagingError(f"{where}: {found}; expected each once")
            first_page[row.data_id] = number
        rows.extend(page.rows)
    if len(rows) != total:
        raise DatasetPagingError(
            f"stream {stream_id!r} dataset: {len(pages)} pages hold {len(rows)} rows, total is {total}"
        )
    return rows


def task_type(tags: Sequence[str]) -> str:
    """The one `domain:<x>` tag's x; `unknown` where there is none or several differ."""
    domains = {tag.removeprefix("domain:") for tag in tags if tag.startswith("domain:")}
    return domains.pop() if len(domains) == 1 else "unknown"


def read_result(answer: object, task_id: str | None) -> TaskResult:
    """A task's result out of its envelopes.

    Args:
        answer: The decoded answer.
        task_id: The task asked for; None for a launch's answer, where the Arena names it.

    Raises:
        TaskResultError: No result, another task's, a score that is no finite number, or success without a score.
    """
    value = _opened(answer)
    who = f"task {task_id!r}" if task_id else "launched task"
    found_id = value.get("task_id")
    if found_id is not None and not (isinstance(found_id, str) and found_id):
        raise TaskResultError(f"{who}: task_id is {shown(found_id)}, expected a text")
    if task_id is not None and found_id not in (None, task_id):
        raise TaskResultError(f"{who}: the Arena answered with the result of {shown(found_id)}")
    name = task_id or found_id
    if not isinstance(name, str):
        raise TaskResultError(f"{who}: the answer names no task_id: {shown(value)}")
    score = _score(value.get("score"), who)
    status = _status(value.get("status"), score, has_id=found_id is not None, who=who)
    if status in SUCCESS_STATUSES and score is None:
        raise TaskResultError(f"{who}: status {status} without a score at the top level; expected a finite number")
    return TaskResult(
        task_id=name,
        status=status,
        score=score,
        raw=value.get("raw"),
        artifacts_uri=_text(value.get("artifacts_uri")),
        trace_id=_text(value.get("trace_id")),
        computed_at=_text(value.get("computed_at")),
    )


def check_reward(name: str, expected: RewardRef | None, found: VersionedRef | None) -> str | None:
    """What is wrong with a live stream's reward, or None: it must be the expected one."""
    if expected is None or (found is not None and (found.key, found.version) == (expected.key, expected.version)):
        return None
    seen = "none" if found is None else str(found)
    return f"stream {name!r}: expected reward {expected.key}@{expected.version}, the live stream has {seen}"


def _opened(answer: object) -> Json:
    value = answer
    for _ in range(MAX_ENVELOPE_DEPTH):
        if not is_json(value) or any(name in value for name in _RESULT_FIELDS):
            break
        inner = next((value[name] for name in ENVELOPES if is_json(value.get(name))), None)
        if inner is None:
            break
        value = inner
    if not is_json(value) or not any(name in value for name in _RESULT_FIELDS):
        names = "/".join(ENVELOPES)
        raise TaskResultError(
            f"expected a result within {MAX_ENVELOPE_DEPTH} envelopes ({names}), found {shown(answer)}"
        )
    return value


def _score(value: object, who: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TaskResultError(f"{who}: score is {shown(value)}, expected a finite number")
    return float(value)


def _status(value: object, score: float | None, *, has_id: bool, who: str) -> str:
    if isinstance(value, str) and value:
        return value
    if value not in (None, ""):
        raise TaskResultError(f"{who}: status is {shown(value)}, expected a text")
    if score is not None:
        return "DONE"
    if has_id:
        return "PENDING"
    raise TaskResultError(f"{who}: the answer has neither status, score nor task_id")


def _data_ids(value: object, where: str) -> list[str]:
    if not is_list(value):
        raise DatasetPagingError(f"{where}: data_ids is {shown(value)}, expected a list")
    ids: list[str] = []
    for data_id in value:
        if not isinstance(data_id, str) or not data_id:
            raise DatasetPagingError(f"{where}: a data_id is {shown(data_id)}, expected a non-empty text")
        ids.append(data_id)
    return ids


def _item_tags(value: object, ids: list[str], where: str) -> list[tuple[str, ...]]:
    if value is None:
        return [()] * len(ids)
    items = [item for item in value if is_json(item)] if is_list(value) else []
    found = [item.get("data_id") for item in items]
    if found != ids:
        raise DatasetPagingError(f"{where}: items name {shown(found)}, expected the same ids as data_ids {shown(ids)}")
    tags: list[tuple[str, ...]] = []
    for item in items:
        given = item.get("tags") or []
        if not is_list(given) or not all(isinstance(tag, str) for tag in given):
            raise DatasetPagingError(
                f"{where}: tags of {shown(item.get('data_id'))} are {shown(given)}, expected texts"
            )
        tags.append(tuple(str(tag) for tag in given))
    return tags


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
