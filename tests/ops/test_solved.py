"""Solved tasks by stream and task type."""

from ops.solved import SolvedCounts
from schemas.messages.rollout import EpisodeClass, Trajectory
from schemas.messages.sampling import GroupIssued


def _issued(ordinal: int, *tags: str, evaluation: bool = False) -> GroupIssued:
    return GroupIssued(
        group=f"g{ordinal}",
        ordinal=ordinal,
        stream="s",
        data_id="d",
        tags=list(tags),
        num_slots=2,
        evaluation=evaluation,
    )


def _ready(ordinal: int, slot: int, *, solved: bool = False, rejected: bool = False) -> Trajectory:
    return Trajectory(
        group=f"g{ordinal}", slot=slot, attempt=0, session="s", stream="s", data_id="d",
        outcome=EpisodeClass.SCORED, rejected=rejected, solved=solved,
    )  # fmt: skip


def test_each_task_type_of_a_stream_has_its_own_figures() -> None:
    counts = SolvedCounts()
    for message in (
        _issued(0, "domain:sums"), _ready(0, 0, solved=True), _ready(0, 1),
        _issued(1, "domain:sums"), _ready(1, 0), _ready(1, 1, rejected=True),
        _issued(2, "domain:words"), _ready(2, 0, solved=True), _ready(2, 1, solved=True),
        _issued(3), _ready(3, 0, rejected=True),
    ):  # fmt: skip
        counts.take(message)
    sums, words = counts.results()
    assert (sums.task_type, sums.num_groups, sums.num_rollouts, sums.solved) == ("sums", 2, 3, 1 / 3)
    assert [(one.k, one.value) for one in sums.pass_at_k] == [(1, 0.25), (2, 1.0)]
    assert (words.task_type, words.solved) == ("words", 1.0)


def test_a_second_message_of_a_slot_and_evaluations_count_for_nothing() -> None:
    counts = SolvedCounts()
    for message in (_issued(0), _ready(0, 0), _ready(0, 0, solved=True), _issued(1, evaluation=True), _ready(1, 0)):
        counts.take(message)
    (found,) = counts.results()
    assert (found.task_type, found.num_groups, found.solved) == ("unknown", 1, 0.0)
