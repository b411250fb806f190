"""The launch stage: one attempt at a slot, from the request to its end.

    tries on the log? ─ none ──▶ open session ─▶ intent on the log ─▶ POST ─▶ task id on the log ─▶ poll ─▶ end
                      ├ intent only ──▶ that POST may have been in flight: close its session, try anew with another
                      └ accepted ──▶ take the task over by its id ──▶ poll ─▶ end

No Arena call cancels a task or makes a launch idempotent: at the most one extra launch happens per POST that was in
flight at a fault, and each is counted. The first terminal result of a slot on the log counts. An episode whose group is
closed is not waited for: its session ends here and the Arena's task runs out by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
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
from schemas.messages.rollout import EpisodeAccepted, EpisodeEnded, EpisodeLaunched
from schemas.messages.sampling import EpisodeRequested
from schemas.topics import EPISODE_ENDED, EPISODE_REQUESTED
from stages.arena_launch.groups import ClosedGroups
from stages.arena_launch.outcome import TryEnd, ended_without_try, outputs
from stages.arena_launch.polling import Pace, Pause, pause
from stages.arena_launch.ports import Access, Arena, LaunchLog, LaunchTry, RewardCheck, Route, Sessions
from stages.clients.arena.classify import LOCAL_WAIT_CANCELLED, LOCAL_WAIT_TIMEOUT
from stages.clients.arena.client import Launch
from stages.clients.arena.errors import (
    ArenaBusyError,
    ArenaContractError,
    ArenaError,
    ArenaFatalError,
    ArenaNotFoundError,
    ArenaRetryableError,
    RewardDriftError,
)
from stages.clients.arena.retry import pause_s
from stages.clients.arena.wire import TaskResult

log = structlog.get_logger("headrace.launch")

LAUNCH_REFUSED: Final = "LOCAL_LAUNCH_REFUSED"
GAVE_UP: Final = "LOCAL_GAVE_UP"


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How episodes are launched and watched."""

    streams: Mapping[str, StreamConfig]
    arena: ArenaSettings
    attempts: int


class _Ports(msgspec.Struct, frozen=True, kw_only=True):
    launches: LaunchLog
    sessions: Sessions
    route: Route
    arena: Arena
    settings: LaunchSettings
    metrics: Metrics
    reward: RewardCheck | None
    pace: Pace
    pause: Pause


def gave_up(requested: EpisodeRequested, reason: str) -> Outputs:
    """A request that went to the dead letters still ends its slot, so that its group can close."""
    return [ended_without_try(requested, status=GAVE_UP, error=reason)]


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
    reward: RewardCheck | None = None,
    groups: ClosedGroups | None = None,
    pace: Pace | None = None,
    pause: Pause = pause,
) -> list[EpisodeEnded | EpisodeRequested]:
    """Run one attempt at a slot to its end; a system failure within the budget asks for the next attempt.

    Raises:
        RetryableError: something outside was away; the next delivery takes up what the log knows.
    """
    stream = settings.streams.get(requested.stream)
    if stream is None:
        raise RefusedError(f"stream {requested.stream!r} is in no [[streams]] table of this run")
    ports = _Ports(
        launches=launches,
        sessions=sessions,
        route=route,
        arena=arena,
        settings=settings,
        metrics=metrics,
        reward=reward,
        pace=pace or Pace(settings.arena.poll_interval_s),
        pause=pause,
    )
    known = groups or ClosedGroups()
    closed = known.join(requested.group)
    try:
        return await _attempt(requested, stream, closed, ports)
    finally:
        known.leave(requested.group)


async def _attempt(
    requested: EpisodeRequested, stream: StreamConfig, group_closed: anyio.Event, ports: _Ports
) -> list[EpisodeEnded | EpisodeRequested]:
    started_s = anyio.current_time()
    tries = await ports.launches.tries(requested)
    latest = tries[-1] if tries else None
    if latest is not None and latest.accepted is not None:
        ended = await _take_over(latest, latest.accepted, stream, group_closed, ports)
    else:
        if latest is not None:
            await _disown(latest, ports)
        if group_closed.is_set():
            return [ended_without_try(requested, status=LOCAL_WAIT_CANCELLED, error="its group is closed")]
        try:
            if ports.reward is not None:
                await ports.reward.check(stream)
        except RewardDriftError as error:
            return [ended_without_try(requested, status=LAUNCH_REFUSED, error=str(error))]
        ended = await _launch(requested, stream, len(tries), group_closed, ports)
    return outputs(
        requested,
        ended,
        attempts=ports.settings.attempts,
        max_raw_bytes=ports.settings.arena.max_raw_bytes,
        seconds=anyio.current_time() - started_s,
    )


async def _disown(latest: LaunchTry, ports: _Ports) -> None:
    """A former try whose answer nobody has: its task may run, so its session ends and its registration goes."""
    await ports.sessions.close(latest.launched.session)
    await ports.route.forget(latest.launched)
    gauges = ports.metrics.gauges
    gauges["extra_launches"] = gauges.get("extra_launches", 0) + 1
    log.warning("a launch is repeated with a new session", session=latest.launched.session)


async def _launch(
    requested: EpisodeRequested, stream: StreamConfig, launch_try: int, group_closed: anyio.Event, ports: _Ports
) -> TryEnd:
    session = session_id(requested.group, requested.slot, requested.attempt, launch_try)
    ticket = await ports.sessions.open(session, min_version=requested.min_version)
    async with ports.route.reach(stream, ticket) as access:
        launched = EpisodeLaunched(
            group=requested.group,
            slot=requested.slot,
            attempt=requested.attempt,
            launch_try=launch_try,
            session=session,
            route=ports.route.name,
            model_name=access.model_name,
        )
        async with ports.pace.launching:  # from intent to task id: what a fault can leave in doubt stays bounded
            await ports.launches.record(launched)
            try:
                result = await _post(_launch_of(requested, stream, session, access), ports)
            except ArenaFatalError as error:
                return await _close(launched, ports, None, LAUNCH_REFUSED, str(error))
            if result.terminal:
                return await _close(launched, ports, result, result.status, "")
            await ports.launches.record(
                EpisodeAccepted(
                    group=requested.group,
                    slot=requested.slot,
                    attempt=requested.attempt,
                    launch_try=launch_try,
                    task_id=result.task_id,
                )
            )
        with ports.pace.watching():
            return await _watch(launched, result.task_id, stream, group_closed, ports)


async def _post(launch: Launch, ports: _Ports) -> TaskResult:
    """POST; only 429 is answered by another one under the same session, since then nothing was launched."""
    for number in range(ports.settings.arena.request_retries):
        try:
            return await ports.arena.launch(launch)
        except ArenaBusyError:
            await ports.pause(pause_s(number, None, datetime.now(UTC)), anyio.Event())
    return await ports.arena.launch(launch)


def _launch_of(requested: EpisodeRequested, stream: StreamConfig, session: str, access: Access) -> Launch:
    return Launch(
        stream_id=stream.stream_id,
        data_id=requested.data_id,
        model_name=access.model_name,
        base_url=access.base_url,
        api_key=access.api_key,
        envs=dict(access.envs),
        session_id=session,
        harness=stream.harness,
    )


async def _take_over(
    latest: LaunchTry, accepted: EpisodeAccepted, stream: StreamConfig, group_closed: anyio.Event, ports: _Ports
) -> TryEnd:
    """Another worker launched it: watch the same task."""
    log.info("a running task is taken over", session=latest.launched.session, task_id=accepted.task_id)
    async with ports.route.resume(latest.launched):
        with ports.pace.watching():
            return await _watch(latest.launched, accepted.task_id, stream, group_closed, ports)


async def _watch(
    launched: EpisodeLaunched, task_id: str, stream: StreamConfig, group_closed: anyio.Event, ports: _Ports
) -> TryEnd:
    """Poll a task until its terminal result, its deadline, or its group's end; an Arena that is away is waited for."""
    started_s = anyio.current_time()
    timeout_s = ports.settings.arena.task_timeout_s
    unit = zlib.crc32(task_id.encode()) / 2**32
    away = ""
    while (age_s := anyio.current_time() - started_s) < timeout_s:
        due_s = anyio.current_time() + min(ports.pace.wait_s(stream.name, age_s, unit), timeout_s - age_s)
        await ports.pause(due_s - anyio.current_time(), group_closed)
        if group_closed.is_set():
            return await _close(launched, ports, None, LOCAL_WAIT_CANCELLED, "its group is closed")
        ports.pace.looked(anyio.current_time() - due_s)
        try:
            result = await ports.arena.task_result(task_id)
        except ArenaNotFoundError as error:
            return await _close(launched, ports, None, "NOT_FOUND", str(error))
        except ArenaContractError as error:
            return await _close(launched, ports, None, "CONTRACT", str(error))
        except ArenaRetryableError as error:
            away = str(error)
            continue
        if result.terminal:
            ports.pace.ended(stream.name, anyio.current_time() - started_s)
            return await _close(launched, ports, result, result.status, "")
    reason = f"task {task_id} had no terminal result within {timeout_s:g} s"
    return await _close(launched, ports, None, LOCAL_WAIT_TIMEOUT, f"{reason}; {away}" if away else reason)


async def _close(
    launched: EpisodeLaunched, ports: _Ports, result: TaskResult | None, status: str, error: str
) -> TryEnd:
    closed = await ports.sessions.close(launched.session)
    if status == "HARNESS_FAILED" and not closed.num_interactions:
        await ports.route.suspect(launched)
    receipt: object = None
    path = ports.settings.arena.receipt_path
    if result is not None and status == "HARNESS_FAILED" and path:
        try:
            receipt = await ports.arena.receipt(path, result.task_id)
        except ArenaError as receipt_error:
            log.warning("no receipt", task_id=result.task_id, error=str(receipt_error))
            receipt = {"unreadable": str(receipt_error)}  # asked for and not to be had: never a looser rule
    return TryEnd(launched=launched, result=result, closed=closed, receipt=receipt, status=status, error=error)
