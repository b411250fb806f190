from __future__ import annotations

import msgspec

from ops.accounts import Account
from ops.run_account import AccountState, RunAccount
from schemas.messages.rollout import EpisodeClass, EpisodeEnded, Trajectory
from schemas.messages.sampling import GroupClosed, GroupIssued
from schemas.messages.training import DroppedGroup, StepAssembled, StepTrained
from schemas.payload import run_ref


def issued(group: str, slots: int = 1) -> GroupIssued:
    return GroupIssued(group=group, ordinal=0, stream="s", data_id="d", num_slots=slots)


def ended(group: str, slot: int = 0) -> Trajectory:
    return Trajectory(
        group=group,
        slot=slot,
        attempt=0,
        session="x",
        stream="s",
        data_id="d",
        outcome=EpisodeClass.SCORED,
        rejected=False,
    )


def closed(group: str, reason: str = "") -> GroupClosed:
    return GroupClosed(group=group, stream="s", usable=not reason, reason=reason)


def assembled(step: int, *groups: str, dropped: tuple[str, ...] = (), min_version: int = 0) -> StepAssembled:
    return StepAssembled(
        step=step,
        manifest=run_ref(b""),
        groups=list(groups),
        dropped=[DroppedGroup(group=group, stream="s", reason="stale: too old") for group in dropped],
        num_rows=len(groups),
        num_tokens=1,
        num_mini_batches=1,
        min_version=min_version,
        mean_reward=0.5,
    )


def trained(step: int, generation: int = 1) -> StepTrained:
    return StepTrained(step=step, generation=generation, digest="", manifest_id="")


def account(*messages: msgspec.Struct, folded_up_to: int = 10**9) -> RunAccount:
    collected = Account("demo", staleness_bound=1)
    for sequence, message in enumerate(messages, start=1):
        collected.take(message, sequence)
    return collected.result(folded_up_to=folded_up_to)


def test_every_group_ends_in_exactly_one_way() -> None:
    found = account(
        *(issued(name) for name in ("a", "b", "c", "d", "e")),
        *(ended(name) for name in ("a", "b", "c", "d")),
        closed("a"),
        closed("b", "zero_spread"),
        closed("c"),
        closed("d"),
        assembled(1, "a", dropped=("c",)),
        trained(1),
    )
    assert (found.groups.issued, found.groups.trained, found.groups.dropped, found.groups.open) == (5, 1, 2, 2)
    assert (found.unexplained, found.doubled) == (0, 0)
    assert found.dropped_by_reason == {"stale": 1, "zero_spread": 1}


def test_a_step_that_two_incarnations_trained_counts_once() -> None:
    found = account(issued("a"), ended("a"), closed("a"), assembled(1, "a"), trained(1, 1), trained(1, 2))
    assert (found.steps, found.groups.trained, found.trained_rows, found.doubled) == (1, 1, 1, 0)


def test_a_group_in_two_steps_is_doubled() -> None:
    found = account(issued("a"), ended("a"), closed("a"), assembled(1, "a"), assembled(2, "a"), trained(1), trained(2))
    assert found.doubled == 1


def test_a_group_that_was_trained_and_dropped_is_doubled() -> None:
    found = account(issued("a"), ended("a"), closed("a"), assembled(1, "a"), trained(1), assembled(2, dropped=("a",)))
    assert found.doubled == 1


def test_a_whole_group_that_assembly_read_and_never_closed_is_unexplained() -> None:
    whole = (issued("a", 2), ended("a", 0), ended("a", 1))
    assert account(*whole).unexplained_groups == ["a"]
    assert account(*whole, folded_up_to=2).unexplained == 0, "assembly has not read its last trajectory yet"


def test_a_group_that_was_never_issued_is_unexplained() -> None:
    assert account(issued("a"), closed("ghost")).unexplained_groups == ["ghost"]


def test_staleness_is_counted_at_the_step_that_uses_a_row() -> None:
    found = account(issued("a"), ended("a"), closed("a"), assembled(3, "a", min_version=1), trained(3))
    assert (found.staleness.max, found.staleness.bound) == (1, 1)


def test_ends_are_counted_by_class_for_each_stream_and_each_harness_that_ran_in_it() -> None:
    def end(slot: int, stream: str, harness: str, outcome: EpisodeClass) -> EpisodeEnded:
        return EpisodeEnded(
            group="a", slot=slot, attempt=0, stream=stream, data_id="d", session="x",
            outcome=outcome, final=True, status="DONE", harness=harness,
        )  # fmt: skip

    found = account(
        end(0, "words", "loop@1", EpisodeClass.SCORED),
        end(1, "words", "loop@1", EpisodeClass.SCORED),
        end(2, "words", "loop@1", EpisodeClass.MODEL),
        end(3, "words", "loop@2", EpisodeClass.SCORED),
        end(4, "sums", "loop@1", EpisodeClass.SYSTEM),
        end(5, "sums", "", EpisodeClass.SYSTEM),
    )
    assert found.classes == {"model": 1, "scored": 3, "system": 2}
    assert [(one.stream, one.harness, one.classes) for one in found.classes_by_harness] == [
        ("sums", "", {"system": 1}),
        ("sums", "loop@1", {"system": 1}),
        ("words", "loop@1", {"model": 1, "scored": 2}),
        ("words", "loop@2", {"scored": 1}),
    ]


def test_a_kept_account_goes_on_counting_by_stream_and_harness() -> None:
    end = EpisodeEnded(
        group="a", slot=0, attempt=0, stream="s", data_id="d", session="x", outcome=EpisodeClass.SCORED, final=True,
        status="DONE", harness="loop@1",
    )  # fmt: skip
    first = Account("run", staleness_bound=1)
    first.take(end, 1)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(first.state), type=AccountState)
    second = Account("run", staleness_bound=1, state=kept)
    second.take(end, 2)
    (found,) = second.result(folded_up_to=2).classes_by_harness
    assert found.classes == {"scored": 2}
