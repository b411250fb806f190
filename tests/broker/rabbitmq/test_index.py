"""What a stream of written messages amounts to: the same for everybody who reads it, from wherever he begins."""

from __future__ import annotations

import asyncio

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.api import Record
from broker.errors import ConflictError
from broker.rabbitmq.channel import guarded
from broker.rabbitmq.index import IndexSnapshot, LogIndex
from broker.rabbitmq.state import FolderState
from broker.rabbitmq.tail import Tail
from broker.topology import DurableSpec
from schemas.subjects import matches

WRITTEN = st.lists(
    st.one_of(
        st.tuples(st.just("message"), st.sampled_from([f"hr.r.a.{letter}.1" for letter in "abcdef"])),
        st.tuples(st.just("purge"), st.integers(0, 8), st.sampled_from(["", "hr.r.a.b.>", "hr.r.a.*.1"])),
        st.tuples(st.just("mark")),
    ),
    max_size=40,
)


def fold(index: LogIndex, written, first_offset: int = 0) -> list[int]:
    accepted = []
    for offset, one in enumerate(written, first_offset):
        match one:
            case ("message", subject):
                accepted.append(index.accept(offset, subject, offset, len(subject)))
            case ("purge", sequence, pattern):
                index.pass_over(offset)
                index.purge_below(sequence, pattern)
            case _:
                index.pass_over(offset)
    return accepted


@given(WRITTEN)
def test_the_first_message_of_a_subject_stands_and_numbers_have_no_gaps(written):
    index, kept, last = LogIndex(), {}, 0
    sequences = iter(fold(index, written))
    for offset, one in enumerate(written):
        match one:
            case ("message", subject):
                sequence = next(sequences)
                if subject in kept:
                    assert sequence == 0
                else:
                    last += 1
                    assert sequence == last
                    kept[subject] = (last, offset)
            case ("purge", below, pattern):
                gone = [
                    s for s, (sequence, _) in kept.items() if sequence < below and (not pattern or matches(pattern, s))
                ]
                for subject in gone:
                    del kept[subject]
            case _:
                pass
    assert index.last_sequence == last
    assert len(index) == len(kept)
    assert index.size_bytes == sum(map(len, kept))
    assert index.first_sequence == min((sequence for sequence, _ in kept.values()), default=last + 1)
    for subject, (sequence, offset) in kept.items():
        found = index.find(subject)
        assert found is not None
        assert (found.sequence, found.digest) == (sequence, offset)
        assert index.offset_of(sequence) == offset
        assert index.subject_of(sequence) == subject


@given(WRITTEN, st.integers(0, 40))
def test_an_index_from_a_snapshot_goes_on_as_the_one_it_was_taken_of(written, cut):
    whole, before = LogIndex(), LogIndex()
    fold(whole, written)
    fold(before, written[:cut])
    data = msgspec.msgpack.encode(before.snapshot())
    restored = LogIndex.restored(msgspec.msgpack.decode(data, type=IndexSnapshot))
    fold(restored, written[cut:], min(cut, len(written)))
    assert restored.snapshot() == whole.snapshot()
    assert len(restored) == len(whole)
    assert restored.size_bytes == whole.size_bytes


@given(WRITTEN)
def test_what_is_folded_twice_counts_once(written):
    once, twice = LogIndex(), LogIndex()
    fold(once, written)
    fold(twice, written)
    accepted = [twice.accept(offset, one[1], 0, 1) for offset, one in enumerate(written) if one[0] == "message"]
    assert not any(accepted)
    assert once.snapshot() == twice.snapshot()


def test_the_first_declaration_of_a_durable_stands():
    index = LogIndex()
    index.declare(DurableSpec(name="d", filters=["hr.r.a.>"]))
    index.declare(DurableSpec(name="d", filters=["hr.r.b.>"]))
    assert index.durables["d"].filters == ["hr.r.a.>"]


@given(st.lists(st.integers(1, 3), max_size=60), st.integers(1, 20), st.integers(1, 200))
def test_a_tail_keeps_the_newest_within_its_bounds(steps, max_records, max_bytes):
    tail, sequence = Tail(max_bytes=max_bytes, max_records=max_records), 0
    for step in steps:
        sequence += step
        tail.add(Record(subject="s" * 10, sequence=sequence, data=b"x" * 5, unix_time_s=0.0))
        assert tail.size_bytes <= max(max_bytes, 15)
        newest = tail.get(sequence)
        assert newest is None or newest.sequence == sequence
        for one in range(sequence + 2):
            found = tail.get(one)
            assert found is None or found.sequence == one
            assert (found is not None) == (tail.first <= one <= sequence)


async def test_a_forgotten_value_never_lends_its_revision_to_another(tmp_path):
    state = FolderState(tmp_path)
    first = await state.save("k.a", b"1", 0)
    await state.delete("k.a")
    await state.delete("unknown")
    assert await state.load("k.a") is None
    with pytest.raises(ConflictError):
        await state.save("k.a", b"2", first)
    second = await state.save("k.a", b"2", 0)
    assert second > first
    assert await state.values("k.") == {"k.a": (b"2", second)}
    assert await state.values("j.") == {}


async def test_of_many_writers_of_one_revision_one_wins(tmp_path):
    states, won = [FolderState(tmp_path) for _ in range(4)], []

    async def write(state: FolderState, number: int) -> None:
        try:
            await state.save("lease", str(number).encode(), 0)
        except ConflictError:
            return
        won.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(write, states[number % 4], number)
    assert len(won) == 1
    assert await states[0].load("lease") == (str(won[0]).encode(), 1)


async def test_a_cancellation_that_nobody_asked_for_is_a_lost_connection():
    """aiormq cancels whatever waits on a channel that closes, some of it with error objects that several tasks share."""
    shared = asyncio.CancelledError()

    async def closing():
        raise shared

    async with anyio.create_task_group() as tasks:

        async def call():
            with pytest.raises(ConnectionResetError):
                await guarded(closing())

        for _ in range(3):
            tasks.start_soon(call)


@pytest.mark.parametrize("error", [Exception(), asyncio.InvalidStateError("closed")])
async def test_errors_without_a_kind_of_their_own_are_a_lost_connection(error: Exception):
    """aiormq ends the calls that nobody will answer any more with a bare Exception."""

    async def unanswered():
        raise error

    with pytest.raises(ConnectionResetError):
        await guarded(unanswered())


async def test_ones_own_cancellation_ends_the_call_too():
    ended = asyncio.Event()

    async def hangs():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with anyio.move_on_after(0.01) as scope:
        await guarded(hangs())
    assert scope.cancelled_caught
    with anyio.fail_after(5):
        await ended.wait()
