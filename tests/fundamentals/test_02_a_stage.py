"""Chapter 2: what a stage is.

A stage is an async function from one message to the messages that follow from it. It knows no broker, no retry and no
clock. What it needs from the world it takes as keyword arguments, called ports. So its tests call it, and that is all.
"""

from __future__ import annotations

import pytest

from pipeline.stage import bind, stage
from schemas.messages.sampling import EpisodeRequested, GroupIssued
from schemas.topics import EPISODE_REQUESTED, GROUP_ISSUED
from stages.fan_out import fan_out

ISSUED = GroupIssued(group="g0000000", ordinal=0, stream="words", data_id="d7", num_slots=3, min_version=2)


async def test_fan_out_asks_for_one_episode_a_slot() -> None:
    """The smallest stage of the loop, whole: a group becomes its slots."""
    requested = await fan_out(ISSUED)
    assert [(one.group, one.slot, one.attempt) for one in requested] == [("g0000000", slot, 0) for slot in range(3)]
    assert {one.min_version for one in requested} == {2}


@stage(consumes=GROUP_ISSUED, produces=(EPISODE_REQUESTED,))
async def half(issued: GroupIssued, *, share: float) -> list[EpisodeRequested]:
    """A stage of one's own, with a port: only a share of the slots is asked for."""
    return list(await fan_out(issued))[: int(issued.num_slots * share)]


async def test_ports_are_keyword_arguments() -> None:
    """In a test a port is whatever the test gives."""
    assert len(await half(ISSUED, share=0.7)) == 2


def test_the_declaration_says_what_goes_in_and_what_may_come_out() -> None:
    """`@stage` leaves the function as it is and writes down its topics; nothing is registered anywhere."""
    assert half.consumes is GROUP_ISSUED
    assert half.produces == (EPISODE_REQUESTED,)


def test_binding_gives_a_stage_its_ports_once_and_checks_them() -> None:
    """A port that is missing is found before anything runs. (pyright finds it before that.)"""
    assert bind(half, share=0.5).topics == {EpisodeRequested: EPISODE_REQUESTED}
    with pytest.raises(TypeError, match=r"stage half: missing a required .*share"):
        bind(half)  # pyright: ignore[reportCallIssue] - that is the point
