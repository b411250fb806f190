"""What there is not is told in a line, with exit code 1: no slot, no file, no message, no such limit."""

import json

import msgspec
import pytest

from broker.memory import MemoryBroker, MemoryServer
from broker.recording import Recording, RecordingWriter, new_header
from ops.logtools.export import export_tables
from ops.logtools.inspecting import conversations
from ops.logtools.names import parse_name
from ops.logtools.slot_life import shown_error
from ops.logtools.sources import FileSource
from ops.logtools.why import why
from schemas.messages.rollout import EpisodeClass, EpisodeEnded
from schemas.topics import EPISODE_ENDED


@pytest.mark.parametrize("thing", ["g0/99", "g0000000-99-0"])
def test_why_of_a_slot_that_there_is_not(headrace, recorded, thing):
    code, out, _ = headrace("why", thing, "--in", recorded, "--json")
    found = json.loads(out)
    assert (code, found["fate"]) == (1, "unknown")
    assert found["verdict"] == "group g0000000 has no slot 99, it has slots 0 to 3"


@pytest.mark.parametrize("episode", ["g0/99", "g0/1/7"])
def test_inspect_of_an_episode_that_there_is_not(headrace, recorded, episode):
    code, out, _ = headrace("inspect", recorded, episode)
    assert code == 1
    assert "is not in" in out


def test_a_folder_is_no_recording(headrace, replayed, tmp_path):
    for arguments in (("inspect", "."), ("replay", ".", "--into", tmp_path / "x"), ("record", replayed, "-o", ".")):
        code, _, err = headrace(*arguments)
        assert code == 1
        assert err.startswith("headrace: .: expected a recording's file")


@pytest.mark.parametrize("number", [0, -1])
def test_limits_below_one_are_refused(headrace, recorded, replayed, tmp_path, number):
    commands = {
        "--limit": ("tap", ">", "--run", replayed, "--limit", number),
        "--rotate-bytes": ("record", replayed, "-o", tmp_path / "a.hrrec", "--until-end", "--rotate-bytes", number),
    }
    if number < 0:
        commands["--limit: expected at least 0"] = (
            "replay", recorded, "--stage", "reward", "--diff", "--limit", number,
        )  # fmt: skip
    for name, arguments in commands.items():
        code, _, err = headrace(*arguments)
        assert code == 1
        assert name in err
    assert not (tmp_path / "a.hrrec").exists()


def test_a_replay_that_publishes_nothing_says_so(headrace, recorded, tmp_path):
    code, _, err = headrace("replay", recorded, "--into", tmp_path / "x", "--subject", "nosuch.>")
    assert code == 1
    assert "no message" in err
    assert "--subject" in err


def test_a_replay_goes_to_one_place(headrace, recorded, tmp_path):
    code, _, err = headrace("replay", recorded, "--into", tmp_path / "x", "--url", "nats://127.0.0.1:1")
    assert code == 2
    assert "found both" in err
    assert "found neither" in headrace("replay", recorded)[2]


def test_a_pattern_restricts_what_is_followed(headrace, replayed):
    follow = ("--follow", "g2/0", "--run", replayed, "--from-start", "--limit", 1, "--json")
    seen = json.loads(headrace("tap", "episode.ended", *follow)[1])
    assert (seen["topic"], seen["key"][:10]) == ("episode.ended", "g0000002.0")
    code, _, err = headrace("tap", "--rate", "--follow", "g2", "--run", replayed)
    assert code == 1
    assert "expected one of them" in err


def test_a_pattern_is_checked_before_a_run_is_said_to_be_over(headrace, recorded, tmp_path):
    assert headrace("replay", recorded, "--into", tmp_path / "over", "--quiet")[0] == 0
    assert "did you mean episode.ended" in headrace("tap", "episod.ended", "--run", tmp_path / "over")[2]
    assert "not running" in headrace("tap", "episode.ended", "--run", tmp_path / "over")[2]


def _ended(error):
    return EpisodeEnded(
        group="g0000000", slot=0, attempt=0, stream="s", data_id="d", session="", outcome=EpisodeClass.SCORED,
        final=True, status="DONE", error=error, score=0.0,
    )  # fmt: skip


async def _said(tmp_path, ended):
    pq = pytest.importorskip("pyarrow.parquet")
    broker = MemoryBroker(MemoryServer(), "r")
    await broker.publish(EPISODE_ENDED.subject("r", ended), EPISODE_ENDED.encode(ended))
    path = tmp_path / "a.hrrec"
    writer = RecordingWriter.open(path, new_header("r", headrace_version="0", redactions=[], weights="first"))
    async with broker.read(["hr.r.>"], follow=False) as records:
        writer.write_messages([record async for record in records])
    writer.close()
    with Recording(path) as recording:
        (shown,) = conversations(recording, parse_name("g0/0"))
        life = await why(FileSource(recording), parse_name("g0/0"))
        await export_tables(FileSource(recording), tmp_path, ["episodes"])
    (line,) = pq.read_table(tmp_path / "episodes.parquet").to_pylist()
    return shown.attempts[0].error, next(event.detail for event in life.events if event.what == "ended"), line["error"]


async def test_a_status_is_not_shown_as_the_error_too(tmp_path):
    assert shown_error(_ended("DONE")) == ""
    assert await _said(tmp_path, _ended("DONE")) == ("", "scored: DONE, score 0", "")


async def test_an_error_is_shown(tmp_path):
    ended = msgspec.structs.replace(_ended("no disk"), status="FAILED")
    assert await _said(tmp_path, ended) == ("no disk", "scored: FAILED, score 0, no disk", "no disk")
