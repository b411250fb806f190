import anyio
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.logtools.points import parse_stretch
from ops.logtools.replay import Replay, ReplayConflictError, ReplayOrderError, ReplaySettings
from schemas.errors import ConfigError


async def everything(broker):
    async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
        return [(record.subject, record.sequence, record.data) async for record in records]


def fresh(run="r"):
    return MemoryBroker(MemoryServer(), run)


async def test_a_replay_into_a_fresh_broker_gives_the_same_log(chaotic, recording):
    broker = fresh()
    figures = await Replay(recording, broker).run()
    assert await everything(broker) == await everything(chaotic.broker)
    assert figures.published == recording.num_messages
    assert figures.payloads == recording.num_payloads
    assert figures.missing_payloads == 0


async def test_a_second_replay_publishes_nothing(recording):
    broker = fresh()
    await Replay(recording, broker).run()
    figures = await Replay(recording, broker).run()
    assert (figures.published, figures.standing) == (0, recording.num_messages)


async def test_a_replay_under_another_run_id_only_renames_subjects(recording):
    broker = fresh("again")
    await Replay(recording, broker).run()
    assert (await everything(broker))[0][0] == "hr.again.run.started.0"


async def test_another_message_under_a_key_stops_the_replay(recording):
    broker = fresh()
    await broker.publish("hr.r.run.started.0", b"something else")
    with pytest.raises(ReplayConflictError, match=r"hr\.r\.run\.started\.0 stands at sequence 1 with other bytes"):
        await Replay(recording, broker).run()


class ReorderingBroker(MemoryBroker):
    """Loses its place once, as a lost connection may make it."""

    async def publish(self, subject, data, *, headers=None):
        if subject.endswith("fold.tick.3"):
            await anyio.sleep(0.05)
        return await super().publish(subject, data, headers=headers)


async def test_an_order_that_was_not_kept_is_noticed(recording):
    with pytest.raises(ReplayOrderError, match="stored out of order"):
        await Replay(recording, ReorderingBroker(MemoryServer(), "r")).run()


async def test_a_part_by_step_subject_and_sequence(recording):
    broker = fresh()
    stretch = parse_stretch(recording, "step:2", "step:3")
    settings = ReplaySettings(
        after_sequence=stretch.after_sequence,
        to_sequence=stretch.to_sequence,
        filters=("hr.r.step.>", "hr.r.weights.>"),
    )
    await Replay(recording, broker, settings).run()
    assert [subject for subject, _, _ in await everything(broker)] == [
        "hr.r.step.trained.1.1",
        "hr.r.weights.published.1.1",
        "hr.r.step.assembled.2",
        "hr.r.step.trained.2.1",
        "hr.r.weights.published.2.1",
        "hr.r.step.assembled.3",
        "hr.r.step.trained.3.1",
        "hr.r.weights.published.3.1",
    ]


async def test_step_by_step_waits_after_each_manifest(recording):
    broker = fresh()
    seen = []

    async def wait(step):
        subjects = [subject for subject, _, _ in await everything(broker) if ".step.assembled." in subject]
        seen.append((step, len(subjects)))

    await Replay(recording, broker, ReplaySettings(in_flight=1), between_steps=wait).run()
    assert seen == [(step, step) for step in range(1, 6)]


async def test_the_original_timing_can_be_made_faster(recording):
    first, last = recording.lookup.messages[0][1].head.first_time_s, recording.lookup.messages[-1][1].head.last_time_s
    figures = await Replay(recording, fresh(), ReplaySettings(speed=4.0)).run()
    assert figures.published == recording.num_messages
    assert figures.seconds >= (last - first) / 4.0 * 0.99


@pytest.mark.parametrize("point", ["step:99", "yesterday", "step:", "+9 years"])
async def test_a_place_that_the_recording_has_not_is_refused(recording, point):
    with pytest.raises(ConfigError, match="--from"):
        parse_stretch(recording, point, None)


async def test_times_are_counted_from_the_recordings_start(recording):
    first = recording.lookup.messages[0][1].head.first_time_s
    assert parse_stretch(recording, "+1.5s", "+2m").from_time_s == first + 1.5
    assert parse_stretch(recording, "seq:10", "seq:12").after_sequence == 9
