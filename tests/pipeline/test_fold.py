from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api import Record
from broker.memory import MemoryBroker, MemoryServer
from pipeline.errors import FoldDivergedError
from pipeline.fold import FoldRunner, FoldSettings, Output, replay
from pipeline.metrics import Metrics
from schemas.messages.sampling import GroupClosed, GroupIssued, StreamListed
from schemas.payload import PayloadRef, inline_ref, run_ref
from schemas.topics import DEAD_LETTER, GROUP_CLOSED, GROUP_ISSUED, STREAM_LISTED


class CounterState(msgspec.Struct, kw_only=True):
    total: int = 0


class Counter:
    """Closes every group with the number of slots seen so far; every third brings a payload."""

    name = "counter"
    consumes = (GROUP_ISSUED,)
    produces = (GROUP_CLOSED,)
    state_type = CounterState

    def __init__(self, bias: int = 0) -> None:
        self.bias = bias

    def initial(self) -> CounterState:
        return CounterState()

    def wants(self, message: msgspec.Struct) -> PayloadRef | None:
        return None

    def wanted_by(self, state: CounterState) -> Sequence[PayloadRef]:
        return ()

    def load(self, ref: PayloadRef, data: memoryview) -> None:
        raise AssertionError

    def step(self, state: CounterState, message: msgspec.Struct) -> list[Output]:
        assert isinstance(message, GroupIssued)
        state.total += message.num_slots
        payload = str(state.total).encode()
        closed = GroupClosed(
            group=message.group, stream=run_ref(payload).id, usable=True, num_slots=state.total + self.bias
        )
        return [Output(message=closed, payloads=(payload,) if message.ordinal % 3 == 0 else ())]

    def describe(self, state: CounterState) -> tuple[str, Mapping[str, float]]:
        return "groups", {"total": state.total}


async def fold_all(broker: MemoryBroker, metrics: Metrics, fold: Counter | None = None) -> FoldRunner[CounterState]:
    runner = FoldRunner(fold or Counter(), broker, metrics)
    await runner.restore()
    async with broker.read([GROUP_ISSUED.filter("demo")], after_sequence=runner.sequence, follow=False) as records:
        async for record in records:
            await runner.fold_record(record)
    return runner


async def test_a_fold_follows_the_log_and_checkpoints_at_its_end(broker, metrics, log, wait_until) -> None:
    runner = FoldRunner(Counter(), broker, metrics, FoldSettings(checkpoint_every=10**9))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        for ordinal in range(4):
            await log.issue(ordinal)
        await wait_until(lambda: metrics.succeeded == 4)
        runner.drain()
    assert [m.num_slots for m in await log.messages(GROUP_CLOSED)] == [2, 4, 6, 8]
    again = FoldRunner(Counter(), broker, metrics)
    await again.restore()
    assert (again.state.total, again.sequence) == (8, runner.sequence)


async def test_payloads_stand_before_the_message_that_names_them(broker, metrics, log) -> None:
    await log.issue(0)
    await fold_all(broker, metrics)
    assert bytes(await broker.payloads.get(run_ref(b"2"))) == b"2"


async def test_folding_again_says_nothing_new(broker, log) -> None:
    for ordinal in range(3):
        await log.issue(ordinal)
    first, second = Metrics("demo", "a"), Metrics("demo", "b")
    await fold_all(broker, first)
    before = await log.subjects()
    await fold_all(broker, second)
    assert await log.subjects() == before
    assert (first.published, second.published, second.adopted) == (3, 0, 3)


async def test_an_output_that_differs_from_what_stands_stops_the_fold(broker, metrics, log) -> None:
    await log.issue(0)
    await fold_all(broker, metrics)
    with pytest.raises(FoldDivergedError, match=r"hr\.demo\.group\.closed\.g0000000 stands at sequence 2"):
        await fold_all(broker, metrics, Counter(bias=1))


async def test_an_undecodable_message_is_skipped_and_dead_lettered_once(broker, metrics, log) -> None:
    await log.issue(0)
    await broker.publish("hr.demo.group.issued.bad", b"\xff")
    await log.issue(1)
    await fold_all(broker, metrics)
    await fold_all(broker, metrics)
    assert [m.num_slots for m in await log.messages(GROUP_CLOSED)] == [2, 4]
    (letter,) = await log.messages(DEAD_LETTER)
    assert letter.stage == "counter"


class Lister(Counter):
    """Reads the rows of every stream that is listed."""

    name = "lister"
    consumes = (STREAM_LISTED,)

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[bytes] = []

    def wants(self, message: msgspec.Struct) -> PayloadRef | None:
        assert isinstance(message, StreamListed)
        return message.rows

    def load(self, ref: PayloadRef, data: memoryview) -> None:
        self.loaded.append(bytes(data))

    def step(self, state: CounterState, message: msgspec.Struct) -> list[Output]:
        state.total += 1
        return []


async def list_streams(broker: MemoryBroker, *refs: PayloadRef) -> None:
    for number, ref in enumerate(refs):
        listed = StreamListed(stream=f"s{number}", rows=ref, num_rows=1, weight=1.0)
        await broker.publish(STREAM_LISTED.subject("demo", listed), STREAM_LISTED.encode(listed))


async def test_payloads_that_are_damaged_inside_their_message_make_it_a_dead_letter(broker, metrics, log) -> None:
    whole = inline_ref(b"rows")
    damaged = (
        msgspec.structs.replace(whole, inline=memoryview(b"rowz")),
        msgspec.structs.replace(whole, inline=None),
        msgspec.structs.replace(whole, size_bytes=5),
        msgspec.structs.replace(whole, store="inlime", inline=None),
    )
    await list_streams(broker, *damaged, whole)
    fold = Lister()
    runner = FoldRunner(fold, broker, metrics)
    async with broker.read([STREAM_LISTED.filter("demo")], follow=False) as records:
        async for record in records:
            await runner.fold_record(record)
    assert fold.loaded == [b"rows"]
    assert runner.state.total == 1
    letters = await log.messages(DEAD_LETTER)
    assert [(letter.sequence, letter.reason) for letter in letters] == [(n, "undecodable") for n in range(1, 5)]


async def the_record(broker: MemoryBroker) -> Record:
    async with broker.read([STREAM_LISTED.filter("demo")], follow=False) as records:
        return await anext(aiter(records))


async def test_a_message_whose_payload_was_never_stored_is_refused_and_stays_so_when_it_is_folded_again(
    broker, metrics, log
) -> None:
    await list_streams(broker, run_ref(b"never stored"))
    record, settings = await the_record(broker), FoldSettings(payload_deadline_s=0.0)
    first = FoldRunner(Lister(), broker, metrics, settings)
    await first.fold_record(record)
    await broker.payloads.put(b"never stored")
    second = FoldRunner(Lister(), broker, metrics, settings)
    await second.fold_record(record)
    (letter,) = await log.messages(DEAD_LETTER)
    assert (letter.reason, letter.sequence) == ("refused", record.sequence)
    assert (first.state, second.state) == (CounterState(), CounterState())
    assert first.sequence == second.sequence == record.sequence


async def test_a_payload_that_is_seen_late_is_waited_for(broker, metrics, log, wait_until) -> None:
    await list_streams(broker, run_ref(b"late"))
    fold = Lister()
    runner = FoldRunner(fold, broker, metrics, FoldSettings(payload_deadline_s=60.0))
    record = await the_record(broker)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.fold_record, record)
        await wait_until(lambda: "which the store lacks" in metrics.report().waiting_for)
        await broker.payloads.put(b"late")
    assert (fold.loaded, await log.messages(DEAD_LETTER)) == ([b"late"], [])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)))
@settings(max_examples=60, deadline=None)
def test_a_fold_killed_and_restored_anywhere_gives_the_bytes_of_an_undisturbed_one(
    slots: list[int], kills: set[int], saves: set[int]
) -> None:
    messages = [
        GroupIssued(group=f"g{i:07d}", ordinal=i, stream="s", data_id=str(i), num_slots=n) for i, n in enumerate(slots)
    ]
    expected = [GROUP_CLOSED.encode(output.message) for output in replay(Counter(), messages)]

    async def scenario() -> list[bytes]:
        broker = MemoryBroker(MemoryServer(), "demo")
        runner = FoldRunner(Counter(), broker, Metrics("demo", "x"))
        for position, message in enumerate(messages):
            await broker.publish(GROUP_ISSUED.subject("demo", message), GROUP_ISSUED.encode(message))
            if position in saves:
                await runner.save()
            if position in kills:  # its memory is gone; another one takes up the last checkpoint
                runner = FoldRunner(Counter(), broker, Metrics("demo", "x"))
                await runner.restore()
            async with broker.read(
                [GROUP_ISSUED.filter("demo")], after_sequence=runner.sequence, follow=False
            ) as records:
                async for record in records:
                    await runner.fold_record(record)
        async with broker.read([GROUP_CLOSED.filter("demo")], follow=False) as records:
            return [record.data async for record in records]

    assert anyio.run(scenario) == expected
