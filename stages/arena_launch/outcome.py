"""From what a try came to, to the messages that say so. Pure."""

from __future__ import annotations

import msgspec

from schemas.messages.rollout import EpisodeClass, EpisodeEnded, EpisodeLaunched, SessionClosed
from schemas.messages.sampling import EpisodeRequested
from stages.arena_launch.ports import Ending
from stages.clients.arena.classify import LAUNCH_REFUSED, LOCAL_WAIT_CANCELLED, EpisodeFacts, classify
from stages.clients.arena.errors import ERROR_TEXT_LIMIT
from stages.clients.arena.receipts import read_receipt


class TryEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What one try came to."""

    launched: EpisodeLaunched
    ending: Ending
    closed: SessionClosed
    receipt: object


def outputs(
    requested: EpisodeRequested, ended: TryEnd, *, attempts: int, max_raw_bytes: int, seconds: float
) -> list[EpisodeEnded | EpisodeRequested]:
    """The episode's end; for a system failure within the budget also the next attempt's request."""
    ending, closed = ended.ending, ended.closed
    result = ending.result
    verdict = classify(
        EpisodeFacts(
            status=None if result is None else result.status,
            score=None if result is None else result.score,
            num_interactions=closed.num_interactions,
            context_overflow=closed.context_overflow,
            system_error=closed.system_error,
            receipt=None if result is None else read_receipt(ended.receipt, result.task_id),
        )
    )
    again = verdict.retry and requested.attempt + 1 < attempts and ending.status != LOCAL_WAIT_CANCELLED
    raw = b"" if result is None or result.raw is None else msgspec.json.encode(result.raw)
    end = EpisodeEnded(
        group=requested.group,
        slot=requested.slot,
        attempt=requested.attempt,
        stream=requested.stream,
        data_id=requested.data_id,
        tags=requested.tags,
        session=ended.launched.session,
        outcome=verdict.outcome,
        final=not again,
        status=ending.status,
        error=(ending.error or closed.system_error or verdict.reason)[:ERROR_TEXT_LIMIT],
        score=verdict.score,
        turn_rewards=dict(ending.turn_rewards) if verdict.outcome is EpisodeClass.SCORED else {},
        task_id="" if result is None else result.task_id,
        harness=ended.launched.harness,
        reward_key=ended.launched.reward_key,
        evaluation=requested.evaluation,
        trace_id="" if result is None else result.trace_id or "",
        artifacts_uri="" if result is None else result.artifacts_uri or "",
        computed_at="" if result is None else result.computed_at or "",
        raw_size_bytes=len(raw),
        raw_json=raw if len(raw) <= max_raw_bytes else b"",
        seconds=round(seconds, 3),
    )
    return [end, msgspec.structs.replace(requested, attempt=requested.attempt + 1)] if again else [end]


def ended_without_try(requested: EpisodeRequested, *, status: str, error: str, final: bool = True) -> EpisodeEnded:
    """The end of a request that was never launched: its slot ends, so that its group can close."""
    return EpisodeEnded(
        group=requested.group,
        slot=requested.slot,
        attempt=requested.attempt,
        stream=requested.stream,
        data_id=requested.data_id,
        tags=requested.tags,
        session="",
        outcome=EpisodeClass.SYSTEM,
        final=final,
        status=status,
        error=error[:ERROR_TEXT_LIMIT],
        evaluation=requested.evaluation,
    )


def refused_without_try(
    requested: EpisodeRequested, error: str, *, attempts: int
) -> list[EpisodeEnded | EpisodeRequested]:
    """A request that the Arena refused before anything was launched; within the budget also the next attempt's request."""
    again = requested.attempt + 1 < attempts
    end = ended_without_try(requested, status=LAUNCH_REFUSED, error=error, final=not again)
    return [end, msgspec.structs.replace(requested, attempt=requested.attempt + 1)] if again else [end]
