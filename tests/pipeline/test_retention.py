from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.api import ConsumerStatus
from broker.recording.references import NamedPayload
from pipeline.retention import (
    KEPT_TOPICS,
    LogNeeds,
    Mark,
    Need,
    PayloadUses,
    durable_needs,
    fold_needs,
    hold_needs,
    mark_of,
    purges,
)
from schemas.messages.sampling import GroupClosed, GroupIssued, LogHold
from schemas.messages.training import DroppedGroup, FoldCheckpoint, StepAssembled, StepTrained, WeightsPublished
from schemas.payload import PayloadRef
from schemas.topics import TOPICS

REF = PayloadRef(store="run", id="0" * 32, size_bytes=1)


def issued(number: int) -> GroupIssued:
    return GroupIssued(group=f"g{number:07d}", ordinal=number, stream="s", data_id="1", num_slots=2)


def closed(number: int, *, usable: bool = True, evaluation: bool = False) -> GroupClosed:
    return GroupClosed(group=f"g{number:07d}", stream="s", usable=usable, evaluation=evaluation)


def assembled(step: int, *groups: int, dropped: tuple[int, ...] = ()) -> StepAssembled:
    return StepAssembled(
        step=step,
        manifest=REF,
        groups=[f"g{number:07d}" for number in groups],
        dropped=[DroppedGroup(group=f"g{number:07d}", stream="s", reason="stale") for number in dropped],
        num_rows=1,
        num_tokens=1,
        num_mini_batches=1,
        min_version=0,
        mean_reward=0.0,
    )


def trained(step: int, oldest: int, generation: int = 1) -> StepTrained:
    return StepTrained(step=step, generation=generation, digest="", manifest_id="", oldest_checkpoint_step=oldest)


def lowest(needs: LogNeeds) -> Mark:
    return mark_of(needs.needs(), end=needs.sequence)


def after(*messages: object, trains: bool = True) -> LogNeeds:
    needs = LogNeeds(trains=trains)
    for sequence, message in enumerate(messages, start=1):
        needs.take(sequence, message)  # pyright: ignore[reportArgumentType] - messages of the test
    return needs


def consumer(durable: str, floor: int, pending: int = 0, in_hand: int = 0) -> ConsumerStatus:
    return ConsumerStatus(
        durable=durable,
        filters=[],
        delivered=floor + in_hand,
        ack_floor=floor,
        num_pending=pending,
        num_ack_pending=in_hand,
        num_redelivered=0,
        num_waiting=1,
    )


def test_an_open_group_holds_the_mark_at_its_issue():
    needs = after(issued(0), issued(1), closed(0), assembled(1, 0), trained(1, 1))
    assert lowest(needs) == Mark(sequence=2, held_by="open group g0000001")


def test_a_usable_group_holds_it_until_its_step_is_assembled():
    assert lowest(after(issued(0), closed(0))).sequence == 1
    assert lowest(after(issued(0), closed(0), assembled(1, 0), trained(1, 1))).sequence == 5


def test_a_group_that_is_not_trained_holds_nothing():
    for messages in (
        (issued(0), closed(0, usable=False)),
        (issued(0), closed(0, evaluation=True)),
    ):
        assert lowest(after(*messages)) == Mark(sequence=3, held_by="")
    assert lowest(after(issued(0), closed(0), trains=False)).sequence == 3
    assert lowest(after(issued(0), closed(0), issued(1), assembled(1, 1, dropped=(0,)), trained(1, 1))).sequence == 6


def test_a_step_holds_it_until_the_oldest_kept_checkpoint_has_it():
    needs = after(assembled(1), assembled(2), assembled(3), trained(1, 0), trained(2, 1), trained(3, 1))
    assert lowest(needs).sequence == 2
    assert "oldest kept checkpoint is step 1, so step 2" in lowest(needs).held_by
    needs.take(7, trained(4, 3))
    assert lowest(needs).sequence == 8


def test_a_superseded_trainer_s_word_about_checkpoints_counts_no_more():
    needs = after(assembled(1), assembled(2), trained(1, 0, generation=2), trained(2, 2, generation=1))
    assert lowest(needs).sequence == 1


def test_a_fold_and_a_stage_that_never_started_hold_everything():
    checkpoint = FoldCheckpoint(fold="assembly", sequence=40, state=REF)
    needs = list(fold_needs({"assembly": checkpoint, "sampling": None}))
    assert [(need.sequence, need.held_by) for need in needs] == [
        (41, "fold assembly: its checkpoint"),
        (0, "fold sampling: no checkpoint yet"),
    ]
    found = list(durable_needs(("fan_out", "weights"), [consumer("fan_out", 10), consumer("weights", 5, in_hand=2)]))
    assert [(need.sequence, need.held_by) for need in found] == [(6, "stage weights: 0 messages waiting, 2 in hand")]
    assert next(iter(durable_needs(("fan_out",), []))).held_by == "stage fan_out: never started yet"


def test_readers_hold_what_they_asked_for():
    holds = {"hold.a": LogHold(what="recorder of a.hrrec", sequence=7, ttl_s=60)}
    assert mark_of(hold_needs(holds), end=100) == Mark(sequence=7, held_by="recorder of a.hrrec")


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(0, 150))
def test_the_mark_is_never_above_a_need_nor_above_what_was_looked_at(sequences, end):
    mark = mark_of([Need(sequence=sequence, held_by=str(sequence)) for sequence in sequences], end=end)
    assert mark.sequence <= min([*sequences, end + 1])
    assert mark.sequence == end + 1 or mark.held_by == str(mark.sequence)


def test_inputs_of_the_run_dead_letters_and_the_newest_weights_are_never_purged():
    needs = after(*[None] * 5, WeightsPublished(version=3, generation=1, digest="", manifest=REF), None)
    found = dict(purges("r", [topic.name for topic in TOPICS], 100, needs.kept_weights))
    assert {pattern.removeprefix("hr.r.").removesuffix(".>") for pattern in found} == {
        topic.name for topic in TOPICS
    } - KEPT_TOPICS
    assert found["hr.r.weights.published.>"] == 6
    assert set(found.values()) == {6, 100}
    assert {"run.started", "prompt.published", "dead.letter"} <= KEPT_TOPICS


def named(number: int) -> NamedPayload:
    return NamedPayload(ref=PayloadRef(store="run", id=f"{number:032x}", size_bytes=1), path="x")


def test_a_payload_is_needed_as_long_as_a_message_at_or_above_the_mark_names_it():
    uses = PayloadUses()
    uses.take(10, "trajectory.ready", [named(1), named(2)])
    uses.take(20, "step.assembled", [named(2)])
    uses.take(5, "stream.listed", [named(3)])
    uses.take(8, "weights.published", [named(4)])
    found = [uses.is_named(f"{number:032x}", 15, {8}) for number in (1, 2, 3, 4, 5)]
    assert found == [False, True, True, True, False]
    uses.forget_below(15, {8})
    assert len(uses) == 3


def published(version: int, generation: int) -> WeightsPublished:
    return WeightsPublished(version=version, generation=generation, digest="", manifest=REF, directory="")


def test_a_trainer_that_went_back_keeps_the_newest_weights_and_those_that_it_published_last():
    needs, uses = LogNeeds(trains=True), PayloadUses()
    constant, changed, later = named(1), named(2), named(3)
    for sequence, version, generation, pieces in (
        (10, 9, 1, [constant]),
        (11, 10, 1, [constant, changed]),
        (20, 7, 2, [constant]),
        (30, 8, 2, [constant, later]),
        (31, 11, 1, [constant, named(4)]),  # said by the superseded one when it woke
    ):
        needs.take(sequence, published(version, generation))
        uses.take(sequence, "weights.published", pieces)
    assert (needs.newest_weights, needs.kept_weights) == (11, {11, 30})
    ids = [f"{number:032x}" for number in (1, 2, 3, 4)]
    for _ in range(2):
        assert [uses.is_named(one, 100, needs.kept_weights) for one in ids] == [True, True, True, False]
        uses.forget_below(100, needs.kept_weights)
    floors = dict(purges("r", [topic.name for topic in TOPICS], 100, needs.kept_weights))
    assert floors["hr.r.weights.published.>"] == 11


def test_a_piece_that_later_weights_of_a_lower_version_name_too_stays_for_the_newest():
    needs, uses = LogNeeds(trains=True), PayloadUses()
    for sequence, version, generation in ((10, 10, 1), (20, 7, 2), (30, 8, 2)):
        needs.take(sequence, published(version, generation))
        uses.take(sequence, "weights.published", [named(1)] if version != 8 else [named(2)])
    uses.forget_below(25, needs.kept_weights)
    assert uses.is_named(named(1).ref.id, 25, needs.kept_weights), "version 10 is what an engine that joins loads"


def test_the_time_of_the_mark_is_never_later_than_the_message_s_own():
    uses, times = PayloadUses(), np.cumsum(np.full(100, 0.4))
    for sequence, time_s in enumerate(times.tolist(), start=1):
        uses.passed(sequence, time_s)
    for sequence in range(1, 101):
        assert times[sequence - 1] - 1.0 < uses.time_of(sequence) <= times[sequence - 1]
    uses.forget_below(50, ())
    assert uses.time_of(50) <= times[49]
    assert uses.time_of(0) == 0.0
