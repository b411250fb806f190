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
from schemas.messages.sampling import GroupClosed, GroupIssued
from schemas.payload import PayloadRef
from schemas.topics import GROUP_CLOSED, GROUP_ISSUED


class Pairs(msgspec.Struct, kw_only=True):
    """All that the fold remembers."""

    waiting: str = ""


class PairFold:
    """A fold of one's own: it closes every second group, together with the one before it."""

    name = "pairs"
    consumes = (GROUP_ISSUED,)
    produces = (GROUP_CLOSED,)
    state_type = Pairs

    def __init__(self, reason: str = "second of a pair") -> None:
        self.reason = reason

    def initial(self) -> Pairs:
        return Pairs()

    def step(self, state: Pairs, message: msgspec.Struct) -> list[Output]:
        """No clock, no file, no dice: the state and the message are all there is."""
        assert isinstance(message, GroupIssued)
        if not state.waiting:
            state.waiting = message.group
            return []
        first, state.waiting = state.waiting, ""
        return [
            Output(message=GroupClosed(group=group, stream=message.stream, usable=False, reason=self.reason))
            for group in (first, message.group)
        ]

    def wants(self, message: msgspec.Struct) -> PayloadRef | None:
        return None

    def wanted_by(self, state: Pairs) -> Sequence[PayloadRef]:
        return ()

    def load(self, ref: PayloadRef, data: memoryview) -> None:
        raise NotImplementedError

    def describe(self, state: Pairs) -> tuple[str, Mapping[str, float]]:
        """A fold can always say what it waits for: this is what `headrace status` shows."""
        return f"the group after {state.waiting or 'none'}", {}


def issued(ordinal: int) -> GroupIssued:
    """A group."""
    return GroupIssued(group=group_id(ordinal), ordinal=ordinal, stream="s", data_id="d", num_slots=1)


async def fold_the_log(broker: MemoryBroker, fold: PairFold) -> FoldRunner[Pairs]:
    """A worker of the fold: from its checkpoint, through all that is new."""
    runner = FoldRunner(fold, broker, Metrics(broker.run, fold.name))
    await runner.restore()
    async with broker.read([GROUP_ISSUED.filter(broker.run)], after_sequence=runner.sequence, follow=False) as records:
        async for record in records:
            await runner.fold_record(record)
    return runner


def test_a_fold_is_tested_without_a_broker() -> None:
    """Messages in, messages out."""
    closed = [output.message for output in replay(PairFold(), [issued(0), issued(1), issued(2)])]
    assert [getattr(message, "group", "") for message in closed] == [group_id(0), group_id(1)]


async def test_a_checkpoint_saves_time_and_nothing_else(broker: MemoryBroker, log: RunLog) -> None:
    """A successor goes on where the checkpoint stands and knows what its predecessor knew."""
    await log.publish(issued(0))
    await (await fold_the_log(broker, PairFold())).save()
    await log.publish(issued(1))
    successor = await fold_the_log(broker, PairFold())
    assert successor.metrics.received == 1
    assert await log.find(GROUP_CLOSED, group_id(0)) is not None


async def test_folding_again_says_nothing_twice(broker: MemoryBroker, log: RunLog) -> None:
    """Without a checkpoint all is folded from the start: the same outputs, which stand already."""
    await log.publish(issued(0))
    await log.publish(issued(1))
    await fold_the_log(broker, PairFold())
    again = await fold_the_log(broker, PairFold())
    assert (again.metrics.published, again.metrics.adopted) == (0, 2)


async def test_a_fold_that_would_say_something_else_stops(broker: MemoryBroker, log: RunLog) -> None:
    """Changed code in the middle of a run is found at the first output that differs. It stops rather than guess."""
    await log.publish(issued(0))
    await log.publish(issued(1))
    await fold_the_log(broker, PairFold())
    with pytest.raises(FoldDivergedError, match="stands at sequence 3 with other bytes"):
        await fold_the_log(broker, PairFold(reason="another reason"))
