"""The launch stage: one attempt at a slot, from the request to its end.

    tries on the log? ─ none ──▶ open session ─▶ intent on the log ─▶ POST ─▶ task id on the log ─▶ poll ─▶ end
                      ├ intent only ──▶ that POST may have been in flight: close its session, try anew with another
                      └ accepted ──▶ take the task over by its id ──▶ poll ─▶ end

No Arena call cancels a task or makes a launch idempotent: at the most one extra launch happens per POST that was in
flight at a fault, and each is counted. The first terminal result of a slot on the log counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio
import msgspec
import structlog

from pipeline.delivery import RetryPolicy
from pipeline.errors import RefusedError
from pipeline.metrics import Metrics
from pipeline.stage import Outputs, stage
from schemas.config_arena import ArenaSettings, StreamConfig
from schemas.ids import session_id
from schemas.messages.rollout import EpisodeAccepted, EpisodeClass, EpisodeEnded, EpisodeLaunched, SessionClosed
from schemas.messages.sampling import EpisodeRequested
from schemas.topics import EPISODE_ENDED, EPISODE_REQUESTED
from stages.arena_launch.ports import Arena, LaunchLog, LaunchTry, Route, Sessions
from stages.clients.arena.classify import LOCAL_WAIT_TIMEOUT, EpisodeFacts, classify
from stages.clients.arena.client import Launch
from stages.clients.arena.errors import ArenaContractError, ArenaError, ArenaFatalError, ArenaNotFoundError
from stages.clients.arena.receipts import read_receipt
from stages.clients.arena.wire import TaskResult

log = structlog.get_logger("headrace.launch")

LAUNCH_REFUSED: Final = "LOCAL_LAUNCH_REFUSED"
GAVE_UP: Final = "LOCAL_GAVE_UP"
_FIRST_POLL_S: Final = 0.25


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How episodes are launched and watched."""

    streams: Mapping[str, StreamConfig]
    arena: ArenaSettings
    attempts: int


class _Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What one try came to."""

    launched: EpisodeLaunched
    result: TaskResult | None
    closed: SessionClosed
    receipt: object
    error: str
    status: str


def gave_up(requested: EpisodeRequested, reason: str) -> Outputs:
    """A request that went to the dead letters still ends its slot, so that its group can close."""
    return [_end(requested, status=GAVE_UP, error=reason, final=True)]


@stage(
    consumes=EPISODE_REQUESTED,
    produces=(EPISODE_ENDED, EPISODE_REQUESTED),
    policy=RetryPolicy(max_attempts=3, max_deliveries=20, max_delay_s=10.0),
    concurrency=256,
    gave_up=gave_up,
)
async def launch_episode(
    requested: EpisodeRequested,
    *,
    launches: LaunchLog,
    sessions: Sessions,
    route: Route,
    arena: Arena,
    settings: LaunchSettings,
    metrics: Metrics,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> list[EpisodeEnded | EpisodeRequested]:
    """Run one attempt at a slot to its end; a system failure within the budget asks for the next attempt.

    Raises:
        RetryableError: something outside was away; the next delivery takes up what the log knows.
    """
    stream = settings.streams.get(requested.stream)
    if stream is None:
        raise RefusedError(f"stream {requested.stream!r} is in no [[streams]] table of this run")
    started = anyio.current_time()
    tries = await launches.tries(requested)
    latest = tries[-1] if tries else None
    if latest is not None and latest.accepted is not None:
        ended = await _take_over(latest, latest.accepted, sessions, route, arena, settings, sleep)
    else:
        if latest is not None:
            await sessions.close(latest.launched.session)
            metrics.gauges["extra_launches"] = metrics.gauges.get("extra_launches", 0) + 1
            log.warning("a launch is repeated with a new session", session=latest.launched.session)
        ended = await _launch(requested, stream, len(tries), launches, sessions, route, arena, settings, sleep)
    return _outputs(requested, ended, settings, anyio.current_time() - started)


async def _launch(
    requested: EpisodeRequested,
    stream: StreamConfig,
    launch_try: int,
    launches: LaunchLog,
    sessions: Sessions,
    route: Route,
    arena: Arena,
    settings: LaunchSettings,
    sleep: Callable[[float], Awaitable[None]],
) -> _Ended:
    session = session_id(requested.group, requested.slot, requested.attempt, launch_try)
    ticket = await sessions.open(session, min_version=requested.min_version)
    async with route.reach(stream, ticket) as access:
        launched = EpisodeLaunched(
            group=requested.group,
            slot=requested.slot,
            attempt=requested.attempt,
            launch_try=launch_try,
            session=session,
            route=route.name,
            model_name=access.model_name,
        )
        await launches.record(launched)
        launch = Launch(
            stream_id=stream.stream_id,
            data_id=requested.data_id,
            model_name=access.model_name,
            base_url=access.base_url,
            api_key=access.api_key,
            envs=dict(access.envs),
            session_id=session,
            harness=stream.harness,
        )
        try:
            result = await arena.launch(launch)
        except ArenaFatalError as error:
            return await _close(launched, sessions, arena, settings, None, LAUNCH_REFUSED, str(error))
        if result.terminal:
            return await _close(launched, sessions, arena, settings, result, result.status, "")
        await launches.record(
            EpisodeAccepted(
                group=requested.group,
                slot=requested.slot,
                attempt=requested.attempt,
                launch_try=launch_try,
                task_id=result.task_id,
            )
        )
        return await _watch(launched, result.task_id, sessions, arena, settings, sleep)


async def _take_over(
    latest: LaunchTry,
    accepted: EpisodeAccepted,
    sessions: Sessions,
    route: Route,
    arena: Arena,
    settings: LaunchSettings,
    sleep: Callable[[float], Awaitable[None]],
) -> _Ended:
    """Another worker launched it: watch the same task."""
    log.info("a running task is taken over", session=latest.launched.session, task_id=accepted.task_id)
    async with route.resume(latest.launched):
        return await _watch(latest.launched, accepted.task_id, sessions, arena, settings, sleep)


async def _watch(
    launched: EpisodeLaunched,
    task_id: str,
    sessions: Sessions,
    arena: Arena,
    settings: LaunchSettings,
    sleep: Callable[[float], Awaitable[None]],
) -> _Ended:
    """Poll a task to its terminal result: quickly at first, then at the configured interval."""
    result: TaskResult | None = None
    delay_s = min(_FIRST_POLL_S, settings.arena.poll_interval_s)
    with anyio.move_on_after(settings.arena.task_timeout_s):
        while True:
            await sleep(delay_s)
            delay_s = min(settings.arena.poll_interval_s, delay_s * 1.5)
            try:
                result = await arena.task_result(task_id)
            except ArenaNotFoundError as error:
                return await _close(launched, sessions, arena, settings, None, "NOT_FOUND", str(error))
            except ArenaContractError as error:
                return await _close(launched, sessions, arena, settings, None, "CONTRACT", str(error))
            if result.terminal:
                return await _close(launched, sessions, arena, settings, result, result.status, "")
    reason = f"task {task_id} had no terminal result within {settings.arena.task_timeout_s:g} s"
    return await _close(launched, sessions, arena, settings, None, LOCAL_WAIT_TIMEOUT, reason)


async def _close(
    launched: EpisodeLaunched,
    sessions: Sessions,
    arena: Arena,
    settings: LaunchSettings,
    result: TaskResult | None,
    status: str,
    error: str,
) -> _Ended:
    closed = await sessions.close(launched.session)
    receipt: object = None
    if result is not None and status == "HARNESS_FAILED" and settings.arena.receipt_path:
        try:
            receipt = await arena.receipt(settings.arena.receipt_path, result.task_id)
        except ArenaError as receipt_error:
            log.warning("no receipt", task_id=result.task_id, error=str(receipt_error))
    return _Ended(launched=launched, result=result, closed=closed, receipt=receipt, error=error, status=status)


def _outputs(
    requested: EpisodeRequested, ended: _Ended, settings: LaunchSettings, seconds: float
) -> list[EpisodeEnded | EpisodeRequested]:
    result, closed = ended.result, ended.closed
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
    again = verdict.retry and requested.attempt + 1 < settings.attempts
    raw = b"" if result is None or result.raw is None else msgspec.json.encode(result.raw)
    end = _end(
        requested,
        status=ended.status,
        error=ended.error or closed.system_error or verdict.reason,
        final=not again,
        outcome=verdict.outcome,
        session=ended.launched.session,
        score=verdict.score,
        task_id="" if result is None else result.task_id,
        trace_id=(result.trace_id or "") if result is not None else "",
        artifacts_uri=(result.artifacts_uri or "") if result is not None else "",
        computed_at=(result.computed_at or "") if result is not None else "",
        raw_size_bytes=len(raw),
        raw_json=raw if len(raw) <= settings.arena.max_raw_bytes else b"",
        seconds=round(seconds, 3),
    )
    if not again:
        return [end]
    return [end, msgspec.structs.replace(requested, attempt=requested.attempt + 1)]


def _end(
    requested: EpisodeRequested,
    *,
    status: str,
    error: str,
    final: bool,
    outcome: EpisodeClass = EpisodeClass.SYSTEM,
    session: str = "",
    score: float | None = None,
    task_id: str = "",
    trace_id: str = "",
    artifacts_uri: str = "",
    computed_at: str = "",
    raw_size_bytes: int = 0,
    raw_json: bytes = b"",
    seconds: float = 0.0,
) -> EpisodeEnded:
    return EpisodeEnded(
        group=requested.group,
        slot=requested.slot,
        attempt=requested.attempt,
        stream=requested.stream,
        data_id=requested.data_id,
        tags=requested.tags,
        session=session,
        outcome=outcome,
        final=final,
        status=status,
        error=error[:500],
        score=score,
        task_id=task_id,
        evaluation=requested.evaluation,
        trace_id=trace_id,
        artifacts_uri=artifacts_uri,
        computed_at=computed_at,
        raw_size_bytes=raw_size_bytes,
        raw_json=raw_json,
        seconds=seconds,
    )
