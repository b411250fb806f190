from contextlib import asynccontextmanager

import anyio
import pytest
from waiting import wait_until

from broker.memory import MemoryBroker, MemoryServer
from ops.logtools.dead import LetterState, NoSuchLetterError, content, drop, find_letter, letters, retry
from ops.logtools.sources import LiveSource
from pipeline.delivery import RetryPolicy
from pipeline.errors import RefusedError
from pipeline.fold import FoldRunner, Output
from pipeline.log import RunLog
from pipeline.metrics import Metrics
from pipeline.runner import StageRunner
from pipeline.stage import bind, stage
from schemas.errors import DecodeError
from schemas.messages.sampling import Control, ControlAction, GroupIssued, Tick
from schemas.topics import FOLD_TICK, GROUP_ISSUED, RUN_CONTROL


class Switch:
    broken = True


@stage(consumes=GROUP_ISSUED, produces=(RUN_CONTROL,), policy=RetryPolicy(max_attempts=1))
async def picky(issued, *, switch):
    if switch.broken:
        raise RefusedError("not today")
    return [Control(id=issued.group, action=ControlAction.PAUSE)]


def issued(ordinal=1):
    return GroupIssued(group=f"g{ordinal:07d}", ordinal=ordinal, stream="s", data_id="d", num_slots=1)


@asynccontextmanager
async def scene():
    """A broker, and a running stage that refuses everything until its switch is mended."""
    broker, switch = MemoryBroker(MemoryServer(), "r"), Switch()
    runner = StageRunner(bind(picky, switch=switch), broker, Metrics("r", "picky"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        yield broker, switch
        runner.drain()


async def given_up(broker, message=None):
    await RunLog(broker).publish(message or issued())
    return (await wait_until(lambda: letters(LiveSource(broker))))[0]


async def state_of(broker, name, state):
    found = await find_letter(LiveSource(broker), name)
    return found if found.state is state else None


async def test_a_letter_says_who_gave_what_up_and_why():
    async with scene() as (broker, _):
        letter = await given_up(broker)
        assert (letter.id, letter.topic, letter.key) == ("picky:1", "group.issued", ["g0000001"])
        assert letter.error == "RefusedError: not today"
        shown = content(letter)
        assert shown["message"]["group"] == "g0000001"


async def test_a_retry_is_handled_by_its_stage_again():
    async with scene() as (broker, switch):
        letter = await given_up(broker)
        switch.broken = False
        sent = await retry(broker, letter)
        assert sent.attempt == 1
        await wait_until(lambda: RunLog(broker).find(RUN_CONTROL, "g0000001"))
        await wait_until(lambda: state_of(broker, letter.id, LetterState.HANDLED))
        assert await letters(LiveSource(broker)) == []


async def test_a_retry_that_fails_again_gives_a_new_letter():
    async with scene() as (broker, _):
        letter = await given_up(broker)
        await retry(broker, letter)
        await wait_until(lambda: state_of(broker, letter.id, LetterState.FAILED_AGAIN))
        (newer,) = await letters(LiveSource(broker))
        assert newer.subject == letter.subject
        assert newer.sequence > letter.sequence
        assert newer.letter.data == letter.letter.data


async def test_a_mended_message_is_handled_in_its_place():
    async with scene() as (broker, switch):
        letter = await given_up(broker)
        switch.broken = False
        await retry(broker, letter, mended=GROUP_ISSUED.encode(issued(ordinal=7)))
        await wait_until(lambda: RunLog(broker).find(RUN_CONTROL, "g0000007"))
        with pytest.raises(DecodeError):
            await retry(broker, letter, mended=b"\xc1")


async def test_two_retries_have_numbers_of_their_own():
    async with scene() as (broker, _):
        letter = await given_up(broker)
        assert (await retry(broker, letter)).attempt == 1
        assert (await retry(broker, letter)).attempt == 1, "what another person asked for at the same time is one retry"
        again = await find_letter(LiveSource(broker), letter.id)
        assert (await retry(broker, again)).attempt == 2


async def test_a_dropped_letter_leaves_the_list_and_stays_on_the_log():
    async with scene() as (broker, _):
        letter = await given_up(broker)
        await drop(broker, letter, reason="a test")
        assert await letters(LiveSource(broker)) == []
        (kept,) = await letters(LiveSource(broker), everything=True)
        assert kept.state is LetterState.DROPPED


async def test_a_letter_that_there_is_not_is_named():
    async with scene() as (broker, _):
        with pytest.raises(NoSuchLetterError, match="no dead letter of that id"):
            await find_letter(LiveSource(broker), "picky:99")


class TickFold:
    """Counts ticks: says a control message for each."""

    name = "counter"
    consumes = (FOLD_TICK,)
    produces = (RUN_CONTROL,)
    state_type = Control

    def initial(self):
        return Control(id="x", action=ControlAction.PAUSE)

    def step(self, state, message):
        return [Output(message=Control(id=f"tick-{message.ordinal}", action=ControlAction.PAUSE))]

    def wants(self, message):
        return None

    def describe(self, state):
        return "", {}


async def test_a_fold_handles_a_mended_retry_where_it_stands_on_the_log():
    broker = MemoryBroker(MemoryServer(), "r")
    await broker.publish("hr.r.fold.tick.5", b"\xc1")
    runner = FoldRunner(TickFold(), broker, Metrics("r", "counter"))

    async def fold_all():
        filters = ["hr.r.fold.tick.>", "hr.r.dead.retry.counter.>"]
        async with broker.read(filters, after_sequence=runner.sequence, follow=False) as records:
            async for record in records:
                await runner.fold_record(record)

    await fold_all()
    (letter,) = await letters(LiveSource(broker))
    assert content(letter)["undecodable"]
    await retry(broker, letter, mended=FOLD_TICK.encode(Tick(ordinal=5, period_s=1.0, unix_time_s=0.0)))
    await fold_all()
    assert await RunLog(broker).find(RUN_CONTROL, "tick-5") is not None
