"""The launch stage: one attempt at a slot, from the request to its end.

    tries on the log? ─ none ──▶ open session ─▶ intent on the log ─▶ its runner plays it ─▶ close session ─▶ end
                      ├ intent only ──▶ that launch may have been in flight: close its session, try anew with another
                      └ accepted ──▶ its runner takes it over by its id ─▶ close session ─▶ end

At the most one extra launch happens per launch that was in flight at a fault, and each is counted. The first terminal
result of a slot on the log counts. An episode whose group is closed is not waited for. An Arena that is away costs
neither attempt nor delivery: its episodes wait in their handlers. Who plays episodes (an Arena, the user's own agents) is behind
`EpisodeRunner`; sessions, tries, attempts and classes are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import anyio
import msgspec
import structlog

from pipeline.delivery import RetryPolicy
from pipeline.errors import RefusedError
from pipeline.metrics import Metrics
from pipeline.stage import Outputs, stage
from schemas.config_arena import ArenaSettings, StreamConfig, StreamRunner
from schemas.ids import session_id
from schemas.messages.rollout import EpisodeAccepted, EpisodeEnded, EpisodeLaunched
from schemas.messages.sampling import EpisodeRequested
from schemas.topics import EPISODE_ENDED, EPISODE_REQUESTED
from stages.arena_launch.groups import ClosedGroups
from stages.arena_launch.outcome import TryEnd, ended_without_try, outputs, refused_without_try
from stages.arena_launch.ports import Ending, Episode, EpisodeRunner, LaunchLog, LaunchTry, Sessions
from stages.clients.arena.classify import LAUNCH_REFUSED, LOCAL_WAIT_CANCELLED
from stages.clients.arena.errors import ArenaFatalError, ArenaRetryableError

log = structlog.get_logger("headrace.launch")

GAVE_UP: Final = "LOCAL_GAVE_UP"
_FIRST_LOOK_S: Final = 0.05
_LONGEST_LOOK_S: Final = 0.5
"""Between two questions whether weights that are on their way serve."""
_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 10.0
"""Between two questions whether an Arena that was away answers."""


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How episodes are launched and watched."""

    streams: Mapping[str, StreamConfig]
    arena: ArenaSettings
    attempts: int


class _Ports(msgspec.Struct, frozen=True, kw_only=True):
    launches: LaunchLog
    sessions: Sessions
    runner: EpisodeRunner
    settings: LaunchSettings
    metrics: Metrics


def gave_up(requested: EpisodeRequested, reason: str) -> Outputs:
    """A request that went to the dead letters still ends its slot, so that its group can close."""
    return [ended_without_try(requested, status=GAVE_UP, error=reason)]


@stage(
    consumes=EPISODE_REQUESTED,
    produces=(EPISODE_ENDED, EPISODE_REQUESTED),
    policy=RetryPolicy(max_attempts=3, max_deliveries=60),
    concurrency=256,
    gave_up=gave_up,
)
async def launch_episode(
    requested: EpisodeRequested,
    *,
    launches: LaunchLog,
    sessions: Sessions,
    runners: Mapping[StreamRunner, EpisodeRunner],
    settings: LaunchSettings,
    metrics: Metrics,
    groups: ClosedGroups | None = None,
) -> list[EpisodeEnded | EpisodeRequested]:
    """Run one attempt at a slot to its end; a system failure within the budget asks for the next attempt.

    Raises:
        RetryableError: something outside was away; the next delivery takes up what the log knows.
    """
    stream = settings.streams.get(requested.stream)
    if stream is None:
        raise RefusedError(f"stream {requested.stream!r} is in no [[streams]] table of this run")
    if stream.runner is StreamRunner.ONLINE:
        return []  # it waits at the gateways for a session that claims it
    ports = _Ports(
        launches=launches, sessions=sessions, runner=runners[stream.runner], settings=settings, metrics=metrics
    )
    known = groups or ClosedGroups()
    closed = known.join(requested.group)
    try:
        return await _attempt(
            _Attempt(requested=requested, stream=stream, group_closed=closed, started_s=anyio.current_time()), ports
        )
    finally:
        known.leave(requested.group)


class _Attempt(msgspec.Struct, kw_only=True):
    """One attempt, as far as this handler has come with it."""

    requested: EpisodeRequested
    stream: StreamConfig
    group_closed: anyio.Event
    started_s: float
    opened: str = ""
    """A session that was opened and that no try on the log names yet."""
    is_sent: bool = False
    """Something outside may run for the latest try."""


async def _attempt(attempt: _Attempt, ports: _Ports) -> list[EpisodeEnded | EpisodeRequested]:
    """Begun anew as often as the Arena was away: that takes no delivery, and what the log knows is taken up."""
    num_failures = 0
    while True:
        attempt.is_sent = False
        try:
            found = await _go_on(attempt, ports)
        except ArenaRetryableError as error:
            was_away = await _sit_out(attempt, error, num_failures, ports)
            if attempt.is_sent and not was_away and not attempt.group_closed.is_set():
                raise  # it answers and fails this launch: deliveries bound how often that is tried
            num_failures += 1
        else:
            if attempt.opened:
                await ports.sessions.close(attempt.opened)
            return found


async def _go_on(attempt: _Attempt, ports: _Ports) -> list[EpisodeEnded | EpisodeRequested]:
    requested, stream, group_closed = attempt.requested, attempt.stream, attempt.group_closed
    tries = await ports.launches.tries(requested)
    latest = tries[-1] if tries else None
    if latest is not None and latest.accepted is not None:
        task_id = latest.accepted.task_id
        async with ports.runner.take_over(latest.launched, task_id, stream, group_closed) as ending:
            ended = await _close(latest.launched, ending, ports)
    else:
        if latest is not None:
            await _disown(latest, ports)
        if group_closed.is_set():
            return [ended_without_try(requested, status=LOCAL_WAIT_CANCELLED, error="its group is closed")]
        try:
            refusal = await ports.runner.refusal(stream)
        except ArenaFatalError as error:
            return refused_without_try(requested, str(error), attempts=ports.settings.attempts)
        if refusal:
            return [ended_without_try(requested, status=LAUNCH_REFUSED, error=refusal)]
        if not await _weights_serve(requested.min_version, group_closed, ports):
            return [ended_without_try(requested, status=LOCAL_WAIT_CANCELLED, error="its group is closed")]
        ended = await _launch(attempt, len(tries), ports)
    return outputs(
        requested,
        ended,
        attempts=ports.settings.attempts,
        max_raw_bytes=ports.settings.arena.max_raw_bytes,
        seconds=anyio.current_time() - attempt.started_s,
    )


async def _sit_out(attempt: _Attempt, error: ArenaRetryableError, num_failures: int, ports: _Ports) -> bool:
    """Wait until what an episode needs answers again, at least for a moment, or its group is closed.

    Returns:
        Whether it was away; False: it answers, and failed all the same.
    """
    delay_s, was_away = min(_FIRST_WAIT_S * 2.0 ** min(num_failures, 10), _LONGEST_WAIT_S), False
    async with anyio.create_task_group() as tasks:

        async def stop_when_closed() -> None:
            await attempt.group_closed.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(stop_when_closed)
        try:
            while problem := await ports.runner.away(attempt.stream):
                if not was_away:
                    log.warning("an episode waits", group=attempt.requested.group, waits_for=problem)
                was_away = True
                ports.metrics.wait_for(problem)
                await anyio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_WAIT_S)
            if not was_away and not attempt.is_sent:
                ports.metrics.wait_for(f"the Arena: {error}")
                await anyio.sleep(delay_s)
        finally:
            ports.metrics.work()
        tasks.cancel_scope.cancel()
    return was_away


async def _weights_serve(version: int, group_closed: anyio.Event, ports: _Ports) -> bool:
    """Wait for weights that are still on their way: no time of the Arena's or of an agent's runs meanwhile.

    Returns:
        Whether they serve; False: the group was closed before.
    """
    if await ports.sessions.serves(version):
        return True
    gauges, delay_s = ports.metrics.gauges, _FIRST_LOOK_S
    gauges["waiting_for_weights"] = gauges.get("waiting_for_weights", 0) + 1
    try:
        while not await ports.sessions.serves(version):
            ports.metrics.wait_for(f"weights of version {version} or newer, which no engine serves yet")
            with anyio.move_on_after(delay_s):
                await group_closed.wait()
                return False
            delay_s = min(2 * delay_s, _LONGEST_LOOK_S)
    finally:
        gauges["waiting_for_weights"] -= 1
        ports.metrics.work()
    return True


async def _disown(latest: LaunchTry, ports: _Ports) -> None:
    """A former try whose answer nobody has: it may run, so its session ends and what it registered goes."""
    await ports.sessions.close(latest.launched.session)
    await ports.runner.disown(latest.launched)
    gauges = ports.metrics.gauges
    gauges["extra_launches"] = gauges.get("extra_launches", 0) + 1
    log.warning("a launch is repeated with a new session", session=latest.launched.session)


class _TryLog:
    """A `TryLog` for one try; remembers what it said."""

    def __init__(self, launches: LaunchLog, launched: EpisodeLaunched, attempt: _Attempt) -> None:
        self._launches: Final = launches
        self._attempt: Final = attempt
        self.launched = launched

    async def intend(self, *, route: str, model_name: str, harness: str, reward_key: str = "") -> None:
        self.launched = msgspec.structs.replace(
            self.launched, route=route, model_name=model_name, harness=harness, reward_key=reward_key
        )
        await self._launches.record(self.launched)
        self._attempt.opened, self._attempt.is_sent = "", True

    async def accept(self, task_id: str) -> None:
        launched = self.launched
        await self._launches.record(
            EpisodeAccepted(
                group=launched.group,
                slot=launched.slot,
                attempt=launched.attempt,
                launch_try=launched.launch_try,
                task_id=task_id,
            )
        )


async def _launch(attempt: _Attempt, launch_try: int, ports: _Ports) -> TryEnd:
    requested = attempt.requested
    session = session_id(requested.group, requested.slot, requested.attempt, launch_try)
    ticket = await ports.sessions.open(session, min_version=requested.min_version)
    attempt.opened = session
    try_log = _TryLog(
        ports.launches,
        EpisodeLaunched(
            group=requested.group,
            slot=requested.slot,
            attempt=requested.attempt,
            launch_try=launch_try,
            session=session,
        ),
        attempt,
    )
    episode = Episode(requested=requested, stream=attempt.stream, ticket=ticket)
    async with ports.runner.play(episode, try_log, attempt.group_closed) as ending:
        ended = await _close(try_log.launched, ending, ports)
        attempt.opened = ""
        return ended


async def _close(launched: EpisodeLaunched, ending: Ending, ports: _Ports) -> TryEnd:
    closed = await ports.sessions.close(launched.session)
    receipt = await ports.runner.explain(launched, ending, closed)
    return TryEnd(launched=launched, ending=ending, closed=closed, receipt=receipt)
