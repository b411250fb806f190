"""The example of several Arena streams under its fault plan, with the classes that the plan leads to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ops.connection import open_run
from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeClass, EpisodeEnded, SessionClosed
from schemas.topics import EPISODE_ENDED, SESSION_CLOSED

EXAMPLE = Path(__file__).parents[2] / "examples" / "arena_multi_stream.toml"


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_every_episode_of_the_fault_plan_ends_in_its_planned_class(headrace, tmp_path) -> None:
    async with headrace("--no-training", config=EXAMPLE) as run:
        result = await run.result()
    assert (result["unexplained"], result["registrations_left"]) == (0, 0)
    assert result["groups_by_stream"] == {"words": 28, "sums": 6, "letters.checked": 6}  # 30·3 : 20·1 : 20·1 of 40
    assert result["extra_launches"] >= 4  # four answers to launches are lost, and some launches meet a collected name
    assert result["episodes"]["ended"] == result["episodes"]["requested"]
    interactions: dict[str, int] = {}
    ends: list[EpisodeEnded] = []
    async with (
        open_run(str(tmp_path / "run")) as broker,
        RunLog(broker).read([SESSION_CLOSED, EPISODE_ENDED], follow=False) as entries,
    ):
        async for entry in entries:
            match entry.message:
                case SessionClosed(session=session, num_interactions=count):
                    interactions[session] = count
                case EpisodeEnded():
                    ends.append(entry.message)
                case _:
                    pass
    planned = Counter(_planned(end, interactions.get(end.session, 0)) for end in ends)
    assert planned == Counter(end.outcome for end in ends)
    hung = [end for end in ends if end.status == "LOCAL_WAIT_TIMEOUT"]
    assert [end.final for end in hung] == [False], "the one hung boot is a system failure and is tried again"
    assert result["classes"] == {kind.value: count for kind, count in sorted(planned.items())}
    # Only the three collections can make a harness fail: each hits at most the episodes that run at that moment.
    failed = [end for end in ends if end.status == "HARNESS_FAILED"]
    assert len(failed) <= 3 * 16
    assert {end.status for end in ends} <= {"DONE", "HARNESS_FAILED", "LOCAL_WAIT_TIMEOUT"}


def _planned(end: EpisodeEnded, num_interactions: int) -> EpisodeClass:
    """The class table for the statuses that this plan can give; no session overflows its context here."""
    match end.status:
        case "DONE":
            return EpisodeClass.SCORED
        case "HARNESS_FAILED":
            assert num_interactions <= 1, "a harness fails before its first call, or between two calls"
            return EpisodeClass.UNKNOWN
        case _:
            return EpisodeClass.SYSTEM
