"""How the slots of online streams end: what an ended session was worth, or that nobody came. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from schemas.config_arena import StreamConfig, StreamRunner
from schemas.messages.rollout import LOCAL_UNCLAIMED, EpisodeEnded, EpisodeLaunched, SessionClosed
from schemas.messages.sampling import EpisodeRequested
from stages.arena_launch.outcome import TryEnd, ended_without_try, outputs
from stages.arena_launch.ports import Ending
from stages.clients.arena.wire import TaskResult
from stages.online.slots import Held, OnlineSlots

NO_REWARD = "LOCAL_NO_REWARD"
DISCARDED = "LOCAL_DISCARDED"
"""Statuses of our own, in the audit only."""


class EndSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When slots end by themselves."""

    streams: Mapping[str, StreamConfig]
    """The run's online streams."""
    attempts: int
    """At a slot."""


def is_settled(held: Held, stream: StreamConfig, now_s: float) -> bool:
    """Whether a session is over and its reward can be waited for no longer, or need not."""
    if held.closed is None:
        return False
    if held.discard or held.closed.system_error or (held.rewarded and held.final):
        return True
    return now_s - held.closed_s >= stream.reward_deadline_s


def end_of(held: Held, closed: SessionClosed, settings: EndSettings) -> list[EpisodeEnded | EpisodeRequested]:
    """The end of a session's episode; for one without a reward, within the slot's attempts, also the next attempt."""
    stream = settings.streams[held.requested.stream]
    launched = launch_of(held)
    ended = TryEnd(launched=launched, ending=_ending(held, stream), closed=closed, receipt=None)
    seconds = max(0.0, held.closed_s - held.claimed_s)
    return outputs(held.requested, ended, attempts=settings.attempts, max_raw_bytes=0, seconds=seconds)


def launch_of(held: Held) -> EpisodeLaunched:
    """What the log says of a slot that a session plays."""
    requested = held.requested
    return EpisodeLaunched(
        group=requested.group,
        slot=requested.slot,
        attempt=requested.attempt,
        launch_try=0,
        session=held.session,
        route=StreamRunner.ONLINE.value,
        model_name=held.task,
    )


def unclaimed(slots: OnlineSlots, settings: EndSettings, now_s: float) -> list[EpisodeEnded]:
    """The ends of the slots that nobody claimed in time."""
    found: list[EpisodeEnded] = []
    for group in slots.groups.values():
        deadline_s = settings.streams[group.stream].claim_deadline_s
        if now_s - group.since_s >= deadline_s:
            error = f"no session claimed it within {deadline_s:g} s"
            found += [
                ended_without_try(requested, status=LOCAL_UNCLAIMED, error=error) for requested in group.free.values()
            ]
    return found


def waiting_for(slots: OnlineSlots, streams: Sequence[str]) -> str:
    """What the slots wait for, in words; empty when for nothing."""
    free = {name: slots.num_free(name) for name in streams}
    parts = [f"sessions to claim {number} slots of stream {name}" for name, number in free.items() if number]
    late = sum(held.closed is not None for held in slots.held.values())
    if late:
        parts.append(f"the rewards of {late} ended sessions")
    return ", ".join(parts)


def _ending(held: Held, stream: StreamConfig) -> Ending:
    if held.discard:
        return Ending(status=DISCARDED, error="its service discarded it")
    if not held.rewarded:
        return Ending(status=NO_REWARD, error=f"no reward came within {stream.reward_deadline_s:g} s after its end")
    score = held.score
    if score is None:
        score = sum(held.turn_rewards.values()) / len(held.turn_rewards)
    result = TaskResult(
        task_id=held.session,
        status="DONE",
        score=score,
        raw=None,
        artifacts_uri=None,
        trace_id=None,
        computed_at=None,
    )
    return Ending(status="DONE", result=result, turn_rewards=held.turn_rewards)
