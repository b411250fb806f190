"""A model follows the log and the workers; what it says agrees with the account."""

import time
from contextlib import asynccontextmanager
from io import StringIO

import anyio
import msgspec
import pytest
from rich.console import Console
from waiting import wait_until

from broker.memory import MemoryBroker, MemoryServer
from ops.accounts import account
from ops.control import ask
from ops.logtools.sources import LiveSource
from ops.report.gather import gather
from ops.status import service_of
from ops.top.model import FORGET_S, GROUPS_KEPT, Model
from ops.top.views import engines, group_cells, head, rewards, stages
from ops.top.watching import backlogs, watch
from ops.wiring import STAGES
from pipeline.metrics import WorkerReport, report_subject
from pipeline.presence import TTL_S, PresenceLease
from schemas.messages.sampling import Control, ControlAction, DeadDropped, DeadLetter, DeadRetry, GroupIssued
from stages.rewards.map_rewards import map_rewards
from stages.weights.broadcast import broadcast_weights


def report(stage, **fields):
    return WorkerReport(**{"run": "r", "stage": stage, "worker": "h:1", "unix_time_s": 100.0, **fields})


@asynccontextmanager
async def watched(broker, until):
    """A model that is kept up to date, once `until` holds."""
    model = Model("r")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, broker, model)
        await wait_until(lambda: until(model))
        yield model
        tasks.cancel_scope.cancel()


def drawn(content, width):
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(content)
    return out.getvalue().rstrip("\n").splitlines()


async def test_the_model_agrees_with_the_account(chaotic):
    counted = await account(chaotic.broker, staleness_bound=8)
    ended = counted.groups.trained + counted.groups.dropped

    def complete(model):
        return sum(line.state.startswith(("trained", "dropped")) for line in model.groups.values()) == ended

    async with watched(chaotic.broker, complete) as model:
        states = [line.state for line in model.groups.values()]
        assert sum(state.startswith("trained") for state in states) == counted.groups.trained
        assert sum(state.startswith("dropped") for state in states) == counted.groups.dropped
        assert sum(model.dead.values()) == counted.dead_letters
        assert max(model.staleness) == counted.staleness.max
        assert [round(reward, 6) for _, reward in model.rewards] == counted.reward_by_step


async def test_rewards_by_stream_are_those_of_the_steps(chaotic):
    figures = await gather(LiveSource(chaotic.broker))
    expected = {
        stream: [step.reward_by_stream[stream] for step in figures.steps if stream in step.reward_by_stream]
        for stream in ("math", "words")
    }

    def complete(model):
        return sum(map(len, model.stream_rewards.values())) == sum(map(len, expected.values()))

    async with watched(chaotic.broker, complete) as model:
        assert {stream: list(values) for stream, values in model.stream_rewards.items()} == expected


async def test_an_instruction_is_seen_while_watching(small):
    async with watched(small.broker, lambda model: model.position > 0) as model:
        await ask(small.broker, ControlAction.PAUSE, "lunch")
        await wait_until(lambda: model.asked.word)
        assert "paused (lunch)" in drawn(head(model, 78, time.time()), 78)[1]


async def test_a_fold_that_is_behind_has_a_lag_and_an_oldest_message(small):
    async with watched(small.broker, lambda model: model.position > 0) as model:
        subject = report_subject("r", "assembly")
        told = report("assembly", unix_time_s=time.time(), gauges={"folded_sequence": 1.0})

        async def is_behind():
            await small.broker.announce(subject, msgspec.msgpack.encode(told))
            return model.backlogs.get("assembly")

        await wait_until(is_behind)
        assert model.backlogs["assembly"].count > 0
        assert model.backlogs["assembly"].oldest_unix_s > 0


def test_dead_letters_and_consumers_are_told_under_their_service():
    assert (service_of(map_rewards.__name__), service_of(broadcast_weights.__name__)) == ("rewards", "weights")
    assert service_of("fan_out") == "fan_out"


def test_speed_is_the_difference_between_two_reports():
    model = Model("r")
    model.take_report(report("rewards", received=10))
    model.take_report(report("rewards", received=30, published=5, unix_time_s=102.0))
    worker = model.workers["rewards", "h:1"]
    assert (worker.received_per_s, worker.published_per_s) == (10.0, 2.5)


def test_a_worker_that_started_anew_has_no_negative_speed():
    model = Model("r")
    model.take_report(report("rewards", received=10))
    model.take_report(report("rewards", received=1, unix_time_s=101.0))
    assert model.workers["rewards", "h:1"].received_per_s == 0


def test_workers_that_are_gone_are_forgotten():
    model = Model("r")
    model.take_report(report("rewards"))
    model.forget_silent(100.0 + FORGET_S + 1)
    assert not model.workers


def test_only_the_newest_groups_are_kept():
    model = Model("r")
    for number in range(GROUPS_KEPT + 5):
        issued = GroupIssued(group=f"g{number:07d}", ordinal=number, stream="s", data_id="d", num_slots=2)
        model.take(issued, number + 1, 1.0)
    assert len(model.groups) == GROUPS_KEPT
    assert next(iter(model.groups)) == "g0000005"


async def test_every_panel_fits_its_width(chaotic):
    async with watched(chaotic.broker, lambda model: model.trained_step > 0 and bool(model.stream_rewards)) as model:
        for stage in ("sampling", "gateway", "trainer"):
            model.take_report(report(stage, waiting_for="a very long explanation " * 9, waiting_since_unix_s=1.0))
        for width in (60, 80, 120, 200):
            assert len(drawn(head(model, width, 100.0), width)) == 1 + len(model.troubles(100.0))
            assert len(drawn(stages(model, width, 100.0), width)) == 1 + len(STAGES)
            assert len(drawn(engines(model, 0.0, width), width)) == 2
            assert len(drawn(rewards(model, width), width)) == 4


@pytest.mark.parametrize(
    ("fields", "now_s", "text"),
    [
        ({}, 110.0, "no sign of life for 10 s"),
        ({"labels": {"weights_error": "checksum of w"}}, 101.0, "checksum of w"),
        ({"waiting_for": "calls", "waiting_since_unix_s": 60.0}, 101.0, "calls (41 s)"),
        ({}, 101.0, "working"),
    ],
)
def test_a_stage_says_what_it_does_or_what_is_wrong(fields, now_s, text):
    model = Model("r")
    model.take_report(report("gateway", **fields))
    line = next(line for line in drawn(stages(model, 100, now_s), 100) if line.startswith("gateway"))
    assert text in line


def test_a_group_shows_its_slots_and_what_became_of_it():
    model = Model("r")
    model.take(GroupIssued(group="g0000001", ordinal=1, stream="s", data_id="d", num_slots=2), 7, 90.0)
    cells = [cell.plain for cell in group_cells(model.groups["g0000001"], 100.0)]
    assert cells == ["g0000001", "s", "0/2", "·", "10.00 s", "running"]


def test_a_letter_is_a_trouble_until_somebody_sends_it_again_or_drops_it():
    model = Model("r")
    for sequence in (3, 4):
        letter = DeadLetter(
            stage="map_rewards", sequence=sequence, subject="s", reason="r", error="e", attempts=1, data=b""
        )
        model.take(letter, sequence + 10, 1.0)
    assert [str(one) for one in model.troubles(1.0)] == ["dead letters: rewards: 2 open"]
    model.take(DeadDropped(stage="map_rewards", sequence=3), 20, 1.0)
    model.take(DeadRetry(stage="map_rewards", sequence=4, attempt=1, subject="s", data=b""), 21, 1.0)
    assert model.troubles(1.0) == []


async def test_a_worker_that_comes_while_the_broker_is_asked_is_no_trouble(small):
    model = Model("r")

    class Asked:
        """The run's broker; whenever it is read, another worker speaks."""

        run = "r"
        consumers = small.broker.consumers

        def read(self, *arguments, **options):
            model.take_report(report("assembly", worker=f"h:{len(model.workers)}", gauges={"folded_sequence": 1.0}))
            return small.broker.read(*arguments, **options)

    model.take_report(report("assembly", gauges={"folded_sequence": 1.0}))
    assert (await backlogs(Asked(), model))["assembly"].count > 0


async def test_a_process_that_vanished_without_a_word_is_named(small):
    gone = PresenceLease(small.broker, "trainer.0", ["trainer"], now=lambda: time.time() - TTL_S - 1)
    here = PresenceLease(small.broker, "gateway.0", ["gateway"], now=time.time)
    await here.renew()
    await gone.renew()
    async with watched(small.broker, lambda model: len(model.roll) == 2) as model:
        (dead,) = [one for one in model.troubles(time.time()) if one.kind == "process dead"]
        assert dead.what.startswith("trainer on ")
        assert dead.text.endswith("no word of an end")
    await here.leave()
    async with watched(small.broker, lambda model: len(model.roll) == 1) as model:
        assert "node gone" in {one.kind for one in model.troubles(time.time())}


async def test_a_broker_that_takes_requests_and_answers_none_is_told(monkeypatch):
    monkeypatch.setattr("ops.top.watching._ANSWER_S", 0.05)
    broker = MemoryBroker(MemoryServer(), "r")

    async def never():
        await anyio.sleep_forever()

    monkeypatch.setattr(broker, "log_status", never)
    model = Model("r")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, broker, model)
        await wait_until(lambda: model.problem)
        tasks.cancel_scope.cancel()
    assert drawn(head(model, 80, 100.0), 80)[1] == "the broker does not answer: nothing for 0.05 s"


def test_what_does_not_fit_is_counted_also_on_a_narrow_screen():
    model = Model("r")
    model.position = 1
    for number in range(6):
        model.take_report(
            report("gateway", worker=f"h:{number}", labels={"weights_error": "checksum of w " + "x" * 90})
        )
    lines = drawn(head(model, 80, 100.0), 80)[1:]
    assert len(lines) == 4
    assert lines[-1].endswith("…; and 2 more: headrace status")
    assert len(lines[-1]) <= 80


def test_a_pause_does_not_hide_what_is_wrong():
    model = Model("r")
    model.take_report(report("gateway", labels={"weights_error": "checksum of w"}))
    model.take(Control(id="c", action=ControlAction.PAUSE, reason="lunch"), 1, 1.0)
    lines = drawn(head(model, 80, 100.0), 80)[1:]
    assert lines == ["paused (lunch): r goes on", "weights refused: gateway h:1: checksum of w"]
