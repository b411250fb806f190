"""What evaluations amount to, in the account, in a worker's report and on the screen."""

import io

from rich.console import Console

from broker.memory import MemoryBroker, MemoryServer
from ops.accounts import account
from ops.evaluations import Evaluations, gauges
from ops.running.screen import evaluation_lines, print_summary
from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeClass, Trajectory
from schemas.messages.sampling import GroupClosed, GroupIssued, StreamListed
from schemas.payload import run_ref


def _listed(rows: int) -> StreamListed:
    return StreamListed(stream="e", rows=run_ref(b"rows"), num_rows=rows, weight=1.0)


def _issued(ordinal: int, version: int, *, slots: int = 2, evaluation: bool = True) -> GroupIssued:
    return GroupIssued(
        group=f"g{ordinal:07d}", ordinal=ordinal, stream="e" if evaluation else "a", data_id=str(ordinal),
        num_slots=slots, min_version=version, evaluation=evaluation,
    )  # fmt: skip


def _ready(ordinal: int, slot: int, *, solved: bool = False, rejected: bool = False, evaluation: bool = True):
    return Trajectory(
        group=f"g{ordinal:07d}", slot=slot, attempt=0, session="s", stream="e", data_id=str(ordinal),
        outcome=EpisodeClass.SYSTEM if rejected else EpisodeClass.SCORED, rejected=rejected,
        score=None if rejected else float(solved), solved=solved, evaluation=evaluation,
    )  # fmt: skip


def _closed(ordinal: int) -> GroupClosed:
    return GroupClosed(group=f"g{ordinal:07d}", stream="e", usable=False, reason="evaluation", evaluation=True)


MESSAGES = [
    _listed(2),
    _issued(0, 0), _issued(1, 0), _issued(2, 0, evaluation=False),
    _ready(0, 0, solved=True), _ready(0, 1), _ready(1, 0, rejected=True), _ready(1, 1), _closed(0), _closed(1),
    _ready(2, 0, solved=True, evaluation=False),
    _issued(3, 4), _ready(3, 0, solved=True),
]  # fmt: skip


def _collected() -> Evaluations:
    collected = Evaluations()
    for message in MESSAGES:
        collected.take(message)
    return collected


def test_each_stream_and_version_has_its_own_figures_and_training_groups_are_in_none() -> None:
    first, second = _collected().results()
    assert (first.stream, first.version, first.complete) == ("e", 0, True)
    assert (first.num_tasks, first.num_rollouts, first.num_rejected, first.mean_score) == (2, 3, 1, 1 / 3)
    assert [(one.k, one.value, one.num_tasks) for one in first.pass_at_k] == [(1, 0.25, 2), (2, 1.0, 1)]
    assert (second.version, second.complete) == (4, False)


def test_what_comes_twice_or_after_its_group_was_closed_counts_once() -> None:
    collected = _collected()
    before = collected.results()
    for message in (_ready(0, 0), _ready(1, 0, solved=True), _issued(0, 9)):
        collected.take(message)
    assert collected.results() == before


def test_a_report_holds_the_newest_complete_evaluation() -> None:
    found = gauges(_collected().latest())
    assert found["evaluation.e.version"] == 0
    assert found["evaluation.e.pass@1_low"] < found["evaluation.e.pass@1"] == 0.25 < found["evaluation.e.pass@1_high"]
    (line,) = evaluation_lines(found)
    assert line.startswith("evaluation e at version 0: pass@1 0.250 [")


async def test_the_account_and_the_summary_tell_them_and_explain_their_groups() -> None:
    log = RunLog(MemoryBroker(MemoryServer(), "run"))
    for message in MESSAGES:
        await log.publish(message)
    found = await account(log.broker, staleness_bound=1)
    assert [evaluation.version for evaluation in found.evaluations] == [0, 4]
    assert found.dropped_by_reason == {"evaluation": 2}
    assert found.unexplained == 0
    text = io.StringIO()
    print_summary(found, Console(file=text, width=160), folder="f", interrupted=False)
    assert "version 0: pass@1 0.250" in text.getvalue()
    assert "not complete" in text.getvalue()
