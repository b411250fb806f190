"""Envelope, result and paging rules, answer by answer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config_arena import RewardRef
from stages.clients.arena.errors import ArenaContractError, DatasetPagingError, TaskResultError
from stages.clients.arena.wire import (
    FAILED_STATUSES,
    SUCCESS_STATUSES,
    check_reward,
    join_pages,
    read_page,
    read_result,
    read_stream,
    read_tasks,
    task_type,
)

STREAM = {"stream_id": "s", "status": "ACTIVE"}


@pytest.mark.parametrize("answer", [STREAM, {"data": STREAM}, {"data": {"stream": STREAM}}])
def test_a_stream_is_read_bare_or_in_either_envelope(answer) -> None:
    assert read_stream(answer, "s").stream_id == "s"


def test_a_streams_status_need_not_be_present() -> None:
    assert read_stream({"stream_id": "s"}, "s").status is None


@pytest.mark.parametrize(
    "answer",
    [{}, [], None, "s", {"data": []}, {"stream_id": "other"}, {"stream_id": "s", "status": "PAUSED"}, {"stream_id": 3}],
)
def test_any_other_stream_is_an_error(answer) -> None:
    with pytest.raises(ArenaContractError):
        read_stream(answer, "s")


def test_tasks_are_items_of_task_or_a_bare_list_under_data() -> None:
    task = {"status": "DONE", "harness_ref": {"key": "h", "version": 1}, "reward_ref": {"key": "r", "version": "2"}}
    for answer in ({"items": [{"task": task}]}, {"data": [task]}, {"data": {"items": [{"task": task}]}}, [task]):
        (read,) = read_tasks(answer, "s")
        assert (read.status, str(read.harness), str(read.reward)) == ("DONE", "h@1", "r@2")
    with pytest.raises(ArenaContractError):
        read_tasks({"items": "none"}, "s")
    with pytest.raises(ArenaContractError):
        read_tasks({"items": [{"task": {}}]}, "s")


@pytest.mark.parametrize("status", sorted(FAILED_STATUSES | SUCCESS_STATUSES))
def test_every_known_terminal_status_is_terminal(status) -> None:
    assert read_result({"task_id": "t", "status": status, "score": 0.5}, "t").terminal


@pytest.mark.parametrize("status", ["PENDING", "AGENT_RUNNING", "ANYTHING_ELSE"])
def test_any_other_status_is_still_running(status) -> None:
    assert not read_result({"task_id": "t", "status": status}, "t").terminal


def test_no_status_but_a_score_is_done_and_no_status_but_a_task_id_is_pending() -> None:
    assert read_result({"task_id": "t", "score": 0}, "t").status == "DONE"
    assert read_result({"task_id": "t"}, "t").status == "PENDING"
    with pytest.raises(TaskResultError, match="neither status"):
        read_result({"status": None, "raw": 1}, "t")


@pytest.mark.parametrize("score", [True, False, "0.5", [1], {"value": 1}, math.inf, -math.inf, math.nan])
def test_a_score_that_is_no_finite_number_is_an_error(score) -> None:
    with pytest.raises(TaskResultError, match="finite number"):
        read_result({"task_id": "t", "status": "DONE", "score": score}, "t")


@pytest.mark.parametrize("status", sorted(SUCCESS_STATUSES))
def test_success_without_a_top_level_score_is_an_error_whatever_raw_holds(status) -> None:
    with pytest.raises(TaskResultError, match="without a score"):
        read_result({"task_id": "t", "status": status, "raw": {"score": 1.0}}, "t")


def test_the_score_is_never_searched_for_in_raw() -> None:
    assert read_result({"task_id": "t", "status": "FAILED", "raw": {"score": 1.0}}, "t").score is None


def test_envelopes_are_opened_at_most_four_deep() -> None:
    result = {"task_id": "t", "status": "DONE", "score": 1}
    four = {"result": {"output": {"task": {"data": result}}}}
    assert read_result(four, "t").score == 1
    with pytest.raises(TaskResultError, match="4 envelopes"):
        read_result({"data": four}, "t")


@pytest.mark.parametrize("answer", [None, [], "DONE", {}, {"other": {"status": "DONE"}}])
def test_an_answer_without_a_result_is_an_error(answer) -> None:
    with pytest.raises(TaskResultError):
        read_result(answer, "t")


def test_the_task_id_must_match() -> None:
    with pytest.raises(TaskResultError, match="result of 'other'"):
        read_result({"task_id": "other", "status": "DONE", "score": 1}, "t")
    with pytest.raises(TaskResultError, match="names no task_id"):
        read_result({"accepted": True, "status": "PENDING"}, None)


def _page(ids, *, total=4, offset=0, limit=2, **changes):
    return {"data_ids": ids, "count": len(ids), "total": total, "offset": offset, "limit": limit, **changes}


def test_a_page_is_read_with_its_tags() -> None:
    items = [{"data_id": "a", "tags": ["domain:x"]}, {"data_id": "b", "tags": []}]
    page = read_page(_page(["a", "b"], items=items), stream_id="s", offset=0, limit=2)
    assert [(row.data_id, row.task_type) for row in page.rows] == [("a", "x"), ("b", "unknown")]


@pytest.mark.parametrize("answer", [
    None, [], {}, _page(["a"], total=0), _page(["a"], total=-1), _page(["a"], total=True), _page(["a"], total="4"),
    _page(["a"], offset=1), _page(["a"], limit=3), _page(["a"], count=2), _page(["a", ""]), _page(["a", 3]), _page(["a", "b", "c"]),
    _page("ab"), _page(["a"], items=[{"data_id": "b"}]), _page(["a"], items=[]), _page(["a"], items=[{"data_id": "a", "tags": [1]}]),
])  # fmt: skip
def test_a_page_that_breaks_a_rule_is_an_error_naming_stream_and_page(answer) -> None:
    with pytest.raises(DatasetPagingError, match=r"'s' dataset page offset=0 limit=2"):
        read_page(answer, stream_id="s", offset=0, limit=2)


def _read(*ids, total=4):
    return read_page(_page(list(ids), total=total, limit=4), stream_id="s", offset=0, limit=4)


def test_pages_are_joined_in_order_and_checked_against_the_total() -> None:
    assert [row.data_id for row in join_pages("s", 4, [_read("a", "b"), _read("c", "d")])] == ["a", "b", "c", "d"]
    with pytest.raises(DatasetPagingError, match="total is 5, it was 4"):
        join_pages("s", 4, [_read("a", "b"), _read("c", "d", total=5)])
    with pytest.raises(DatasetPagingError, match="'b' stands on page 0 too"):
        join_pages("s", 4, [_read("a", "b"), _read("b", "d")])
    with pytest.raises(DatasetPagingError, match="hold 3 rows, total is 4"):
        join_pages("s", 4, [_read("a", "b"), _read("c")])


@given(st.lists(st.sampled_from(["domain:a", "domain:b", "domain:", "level:1", "domains:a", ""])))
def test_a_task_type_is_the_one_domain_tag_else_unknown(tags) -> None:
    domains = {tag[7:] for tag in tags if tag.startswith("domain:")}
    assert task_type(tags) == (domains.pop() if len(domains) == 1 else "unknown")
    assert task_type(["domain:a", "domain:b"]) == "unknown"
    assert task_type(["x", "domain:a"]) == "a"


def test_a_pinned_reward_must_be_the_live_streams() -> None:
    expected = RewardRef(key="r", version="2")
    good = read_stream({"stream_id": "s", "default_reward_ref": {"key": "r", "version": 2}}, "s").reward
    assert check_reward("s", None, None) is None
    assert check_reward("s", expected, good) is None
    other = read_stream({"stream_id": "s", "default_reward_ref": {"key": "r", "version": "3"}}, "s").reward
    assert "the live stream has r@3" in check_reward("s", expected, other)
    assert "the live stream has none" in check_reward("s", expected, None)
