import random

import msgspec
import pytest

from broker.recording import Recording
from ops.logtools.lives import Fate
from ops.logtools.names import parse_name
from ops.logtools.sources import FileSource, LiveSource
from ops.logtools.why import why
from schemas.errors import InvalidIdError
from schemas.messages import rollout as r
from schemas.messages import sampling as s
from schemas.messages.training import Manifest
from schemas.topics import topic_named


async def scan(broker):
    """An own reading of the whole log: topic → messages in order, as plain data."""
    found = {}
    async with broker.read(["hr.r.>"], follow=False) as records:
        async for record in records:
            name = ".".join(record.subject.split(".")[2:4])
            message = topic_named(name).decode(record.data)
            found.setdefault(name, []).append((record.sequence, message))
    return found


def expected_group_fate(log, group):
    trained = {message.step for _, message in log.get("step.trained", [])}
    for _, step in log.get("step.assembled", []):
        if group in step.groups:
            return Fate.TRAINED if step.step in trained else Fate.OPEN
        if any(dropped.group == group for dropped in step.dropped):
            return Fate.DROPPED
    for _, closed in log["group.closed"]:
        if closed.group == group:
            return Fate.OPEN if closed.usable else Fate.DROPPED
    return Fate.OPEN if any(message.group == group for _, message in log["group.issued"]) else Fate.UNKNOWN


def expected_slot_fate(log, group, slot):
    closed = next((sequence for sequence, message in log["group.closed"] if message.group == group), None)
    for sequence, message in log["trajectory.ready"]:
        if (message.group, message.slot) == (group, slot):
            if message.rejected:
                return Fate.REJECTED
            return Fate.LATE if closed is not None and sequence > closed else expected_group_fate(log, group)
    if any(f".{group}.{slot}." in message.subject for _, message in log.get("dead.letter", [])):
        return Fate.DEAD
    if closed is not None:
        return Fate.DROPPED
    return Fate.OPEN


async def test_the_fates_of_200_random_things_agree_with_a_scan_of_the_log(chaotic, recorded):
    log = await scan(chaotic.broker)
    chooser = random.Random(5)
    manifests = {
        step.step: msgspec.msgpack.decode(await chaotic.payloads.get(step.manifest), type=Manifest)
        for _, step in log["step.assembled"]
    }
    rows = {row: (number, m) for m in manifests.values() for number, row in enumerate(m.row_ids)}
    things = [("group", f"g{n:07d}") for n in range(24)] + [
        ("episode", f"g{n:07d}/{slot}") for n in range(24) for slot in range(4)
    ]
    things += [("row", row) for row in rows] + [("step", str(step)) for step in manifests]
    with Recording(recorded) as recording:
        sources = (LiveSource(chaotic.broker), FileSource(recording))
        for number, (kind, name) in enumerate(chooser.choices(things, k=200)):
            life = await why(sources[number % 2], parse_name(f"{kind}:{name}"))
            assert life.problems == []
            match kind:
                case "group":
                    assert life.fate == expected_group_fate(log, name), name
                case "episode":
                    group, slot = name.split("/")
                    assert life.fate == expected_slot_fate(log, group, int(slot)), name
                case "row":
                    place, manifest = rows[name]
                    (row,) = life.facts["rows"]
                    assert row["advantage"] == manifest.advantage.as_numpy()[place]
                    assert row["loss_weight"] == manifest.loss_weight.as_numpy()[place]
                    assert (row["step"], life.fate) == (manifest.step, Fate.TRAINED)
                case _:
                    assert life.fate is Fate.TRAINED
                    assert life.facts["groups"] == manifests[int(name)].groups


async def test_a_live_log_and_its_recording_tell_the_same(chaotic, recorded):
    with Recording(recorded) as recording:
        for name in ("g0", "g3/1", "g0000005-2-0-0", "step:2"):
            live = await why(LiveSource(chaotic.broker), parse_name(name))
            assert await why(FileSource(recording), parse_name(name)) == live


async def test_every_message_of_an_episode_is_an_event_of_its_life(chaotic):
    log = await scan(chaotic.broker)
    life = await why(LiveSource(chaotic.broker), parse_name("g0000002/0"))
    told = {event.sequence for event in life.events}
    for name in ("episode.requested", "episode.launched", "episode.accepted", "episode.ended", "trajectory.ready"):
        for sequence, message in log[name]:
            if (message.group, message.slot) == ("g0000002", 0):
                assert sequence in told
    for name in ("session.opened", "interaction.recorded", "session.closed"):
        assert {sequence for sequence, message in log[name] if message.session.startswith("g0000002-0-")} <= told


def find(chaotic, kind):
    return next((pair for pair, fate in chaotic.fates.items() if fate == kind), None)


@pytest.mark.parametrize(
    ("kind", "fate", "words"),
    [
        ("rejected", Fate.REJECTED, "rejected (system): BUILD_FAILED: no disk"),
        ("late", Fate.LATE, "came after its group was closed"),
        ("missing", Fate.DROPPED, "had not ended when its group was closed"),
        ("dead", Fate.DEAD, "given up by arena_launch (attempts): RuntimeError: no route to the Arena"),
        ("refused", Fate.REJECTED, "reward mapping gave up"),
    ],
)
async def test_each_kind_of_end_is_said_in_words(chaotic, kind, fate, words):
    group, slot = find(chaotic, kind)
    life = await why(LiveSource(chaotic.broker), parse_name(f"{group}/{slot}"))
    assert life.fate is fate
    assert words in life.verdict


async def test_an_open_slot_says_what_it_waits_for(small):
    broker = small.broker
    await small.log.publish(s.GroupIssued(group="g0000099", ordinal=99, stream="math", data_id="d", num_slots=2))
    life = await why(LiveSource(broker), parse_name("g99/0"))
    assert (life.fate, life.waits_for) == (Fate.OPEN, "fan-out")
    await small.log.publish(s.EpisodeRequested(group="g0000099", slot=0, attempt=0, stream="math", data_id="d"))
    waits_for = (await why(LiveSource(broker), parse_name("g99/0"))).waits_for
    assert waits_for == "a launch worker with a free place (in an online stream: a session)"
    session = "g0000099-0-0-0"
    await small.log.publish(r.EpisodeLaunched(group="g0000099", slot=0, attempt=0, launch_try=0, session=session))
    assert (await why(LiveSource(broker), parse_name("g99/0"))).waits_for == "the Arena to take the launch"
    await small.log.publish(r.SessionOpened(session=session, gateway="gw", token_digest="0"))
    assert "the agent and the engine" in (await why(LiveSource(broker), parse_name("g99/0"))).waits_for
    group = await why(LiveSource(broker), parse_name("g99"))
    assert "slot 1: fan-out" in group.waits_for


async def test_what_the_log_does_not_speak_of_is_unknown(small):
    for name in ("g77", "g77/0", "step:77", "g0000077-0-0-0", "g0000077-0-0"):
        assert (await why(LiveSource(small.broker), parse_name(name))).fate is Fate.UNKNOWN


@pytest.mark.parametrize("name", ["", "banana", "g1/x", "g1/1/1/1/1", "step:x", "row:g1/1/1/1"])
def test_a_name_that_means_nothing_is_refused(name):
    with pytest.raises(InvalidIdError):
        parse_name(name)
