"""Chapter 5: where state lives.

Two stages must remember: sampling (how many groups are under way) and assembly (which groups are complete). Their state is
a fold over the log: a pure function steps from message to message. It can be computed again from the log at any time, so a
crash costs nothing, and a replay gives the same outputs byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from broker.memory import MemoryBroker
from pipeline.errors import FoldDivergedError
from pipeline.fold import FoldRunner, Output, replay
from pipeline.log import RunLog
from pipeline.metrics import Metrics
from schemas.ids import group_id
from schemas.messages.sampling import GroupClosed, GroupIssued, StreamListed, StreamRow
from schemas.payload import PayloadRef, run_ref
from schemas.topics import GROUP_CLOSED, GROUP_ISSUED, STREAM_LISTED


class Pairs(msgspec.Struct, kw_only=True):
    """All that the fold remembers: the state is what a checkpoint holds, so it names big things instead of holding them."""

    rows: PayloadRef | None = None
    waiting: GroupIssued | None = None


class PairFold:
    """A fold of one's own: it closes every second group, together with the one before it, and says which rows they had."""

    name = "pairs"
    consumes = (STREAM_LISTED, GROUP_ISSUED)
    produces = (GROUP_CLOSED,)
    state_type = Pairs

    def __init__(self, reason: str = "paired") -> None:
        self.reason = reason
        self.places: dict[str, list[str]] = {}
        """By payload: its rows' ids, in order. Loaded, not remembered."""

    def initial(self) -> Pairs:
        return Pairs()

    def step(self, state: Pairs, message: msgspec.Struct) -> list[Output]:
        """No clock, no file, no dice: the state, the message and the payloads that it names are all there is."""
        match message:
            case StreamListed(rows=rows):
                state.rows = rows
                return []
            case GroupIssued():
                first = state.waiting
                if first is None:
                    state.waiting = message
                    return []
                state.waiting = None
                return self._close(state, first, message)
            case _:
                raise AssertionError(f"{self.name} does not consume {type(message).__name__}")

    def _close(self, state: Pairs, *pair: GroupIssued) -> list[Output]:
        reason = f"{self.reason}: rows {' and '.join(str(self._place(state, group)) for group in pair)}"
        return [
            Output(message=GroupClosed(group=group.group, stream=group.stream, usable=False, reason=reason))
            for group in pair
        ]

    def _place(self, state: Pairs, group: GroupIssued) -> int:
        assert state.rows is not None, "a stream is listed before its first group is issued"
        return self.places[state.rows.id].index(group.data_id)

    def wants(self, message: msgspec.Struct) -> PayloadRef | None:
        """What must be at hand before this message can be folded: its worker fetches it."""
        return message.rows if isinstance(message, StreamListed) else None

    def wanted_by(self, state: Pairs) -> Sequence[PayloadRef]:
        """The same for a state out of a checkpoint: the message that named the payload won't come again."""
        return () if state.rows is None else (state.rows,)

    def load(self, ref: PayloadRef, data: memoryview) -> None:
        """Here it is."""
        self.places[ref.id] = [row.data_id for row in msgspec.msgpack.decode(data, type=list[StreamRow])]

    def describe(self, state: Pairs) -> tuple[str, Mapping[str, float]]:
        """A fold can always say what it waits for: this is what `headrace status` shows."""
        return f"the group after {state.waiting.group if state.waiting else 'none'}", {}


ROWS = msgspec.msgpack.encode([StreamRow(data_id=word) for word in ("river", "mill", "wheel")])
LISTED = StreamListed(stream="s", rows=run_ref(ROWS), num_rows=3, weight=1.0)


def issued(ordinal: int) -> GroupIssued:
    """A group: of the third row, of the second, of the first."""
    data_id = ("wheel", "mill", "river")[ordinal]
    return GroupIssued(group=group_id(ordinal), ordinal=ordinal, stream="s", data_id=data_id, num_slots=1)


async def begin(broker: MemoryBroker, log: RunLog) -> None:
    """The stream is listed: its rows are stored before the message that names them."""
    await broker.payloads.put(ROWS)
    await log.publish(LISTED)
    await log.publish(issued(0))


async def fold_the_log(broker: MemoryBroker, fold: PairFold) -> FoldRunner[Pairs]:
    """A worker of the fold: from its checkpoint, through all that is new."""
    runner = FoldRunner(fold, broker, Metrics(broker.run, fold.name))
    await runner.restore()
    filters = [topic.filter(broker.run) for topic in fold.consumes]
    async with broker.read(filters, after_sequence=runner.sequence, follow=False) as records:
        async for record in records:
            await runner.fold_record(record)
    return runner


def test_a_fold_is_tested_without_a_broker() -> None:
    """Messages in, messages out."""
    fold = PairFold()
    fold.load(LISTED.rows, memoryview(ROWS))
    closed = [output.message for output in replay(fold, [LISTED, issued(0), issued(1), issued(2)])]
    assert closed == [
        GroupClosed(group=group_id(ordinal), stream="s", usable=False, reason="paired: rows 2 and 1")
        for ordinal in (0, 1)
    ]


async def test_a_checkpoint_saves_time_and_nothing_else(broker: MemoryBroker, log: RunLog) -> None:
    """A successor goes on where the checkpoint stands, and knows what its predecessor knew: what the checkpoint names is
    loaded again.
    """
    await begin(broker, log)
    await (await fold_the_log(broker, PairFold())).save()
    await log.publish(issued(1))
    successor = await fold_the_log(broker, PairFold())
    assert successor.metrics.received == 1
    closed = await log.find(GROUP_CLOSED, group_id(0))
    assert closed is not None
    assert closed.reason == "paired: rows 2 and 1"


async def test_folding_again_says_nothing_twice(broker: MemoryBroker, log: RunLog) -> None:
    """Without a checkpoint all is folded from the start: the same outputs, which stand already."""
    await begin(broker, log)
    await log.publish(issued(1))
    await fold_the_log(broker, PairFold())
    again = await fold_the_log(broker, PairFold())
    assert (again.metrics.published, again.metrics.adopted) == (0, 2)


async def test_a_fold_that_would_say_something_else_stops(broker: MemoryBroker, log: RunLog) -> None:
    """Changed code in the middle of a run is found at the first output that differs. It stops rather than guess."""
    await begin(broker, log)
    await log.publish(issued(1))
    await fold_the_log(broker, PairFold())
    with pytest.raises(FoldDivergedError, match="stands at sequence 4 with other bytes"):
        await fold_the_log(broker, PairFold(reason="another reason"))
