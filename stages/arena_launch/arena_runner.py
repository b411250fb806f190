"""Episodes as tasks of an Arena: launched once, polled to their terminal result.

    reach the model ─▶ intent on the log ─▶ POST ─▶ task id on the log ─▶ poll ─▶ ending

No Arena call cancels a task or makes a launch idempotent. Knows no session's content and no reward mapping.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import anyio
import structlog

from schemas.config_arena import ArenaSettings, StreamConfig
from schemas.messages.rollout import EpisodeLaunched, SessionClosed
from stages.arena_launch.polling import Pace, Pause, pause
from stages.arena_launch.ports import Access, Arena, Ending, Episode, RewardCheck, Route, TryLog
from stages.clients.arena.classify import LAUNCH_REFUSED, LOCAL_WAIT_CANCELLED, LOCAL_WAIT_TIMEOUT, POLL_REFUSED
from stages.clients.arena.client import Launch
from stages.clients.arena.errors import (
    ArenaAuthError,
    ArenaBusyError,
    ArenaContractError,
    ArenaError,
    ArenaFatalError,
    ArenaNotFoundError,
    ArenaRetryableError,
    RewardDriftError,
)
from stages.clients.arena.preflight import harness_of
from stages.clients.arena.retry import pause_s
from stages.clients.arena.wire import ArenaStream, TaskResult

log = structlog.get_logger("headrace.launch")

_AUTH_LOOKS: Final = 30
"""Looks in a row at a running task that may be refused for our credentials: with their pauses about five minutes. A token that is being
exchanged must not lose tasks that go on running."""
ASKED_AGAIN_S: Final = 1.0
"""Between two questions whether the Arena answers: thousands of episodes may wait for it."""


class ArenaRunner:
    """An `EpisodeRunner` over an Arena."""

    def __init__(
        self,
        arena: Arena,
        route: Route,
        settings: ArenaSettings,
        *,
        reward: RewardCheck | None = None,
        pace: Pace | None = None,
        pause: Pause = pause,
        place: str = "",
        asked_again_s: float = ASKED_AGAIN_S,
    ) -> None:
        """Args:
        arena: Its calls.
        route: How harnesses reach the model.
        settings: Of the run.
        reward: None: no reward is checked, and the live stream's harness is not known.
        pace: When tasks are looked at.
        pause: Waits; a test gives one that doesn't.
        place: Where the Arena is, for people.
        asked_again_s: Between two questions whether it answers.
        """
        self._arena: Final = arena
        self._route: Final = route
        self._settings: Final = settings
        self._reward: Final = reward
        self._pace: Final = pace or Pace(settings.poll_interval_s)
        self._pause: Final = pause
        self._live: Final[dict[str, ArenaStream]] = {}
        """What streams were before the latest launches."""
        self._place: Final = place
        self._asking: Final = anyio.Lock()
        self._asked_again_s: Final = asked_again_s
        self._asked_s = -math.inf
        self._away = ""

    async def refusal(self, stream: StreamConfig) -> str:
        if self._reward is not None:
            try:
                live = await self._reward.check(stream)
            except RewardDriftError as error:
                return str(error)
            if live is not None:
                self._live[stream.name] = live
        return ""

    async def away(self, stream: StreamConfig) -> str:
        async with self._asking:
            if anyio.current_time() >= self._asked_s + self._asked_again_s:
                self._away = await self._look(stream)
                self._asked_s = anyio.current_time()
        return self._away

    async def _look(self, stream: StreamConfig) -> str:
        """A refusal is an answer, too."""
        try:
            await self._arena.get_stream(stream.stream_id)
        except ArenaRetryableError as error:
            return f"the Arena at {self._place}: {error}"
        except ArenaFatalError:
            return ""
        return ""

    @asynccontextmanager
    async def play(self, episode: Episode, log: TryLog, over: anyio.Event) -> AsyncGenerator[Ending]:
        async with AsyncExitStack() as stack:
            try:
                access = await stack.enter_async_context(self._route.reach(episode.stream, episode.ticket))
            except ArenaFatalError as error:
                ending = Ending(status=LAUNCH_REFUSED, error=str(error))
            else:
                ending = await self._play(episode, access, log, over)
            yield ending

    @asynccontextmanager
    async def take_over(
        self, launched: EpisodeLaunched, task_id: str, stream: StreamConfig, over: anyio.Event
    ) -> AsyncGenerator[Ending]:
        log.info("a running task is taken over", session=launched.session, task_id=task_id)
        async with self._route.resume(launched):
            with self._pace.watching():
                ending = await self._watch(task_id, stream, over)
            yield ending

    async def disown(self, launched: EpisodeLaunched) -> None:
        await self._route.forget(launched)

    async def explain(self, launched: EpisodeLaunched, ending: Ending, closed: SessionClosed) -> object:
        if ending.status != "HARNESS_FAILED":
            return None
        if not closed.num_interactions:
            await self._route.suspect(launched)
        path = self._settings.receipt_path
        if ending.result is None or not path:
            return None
        try:
            return await self._arena.receipt(path, ending.result.task_id)
        except ArenaError as error:
            log.warning("no receipt", task_id=ending.result.task_id, error=str(error))
            return {"unreadable": str(error)}  # asked for and not to be had: never a looser rule

    async def _play(self, episode: Episode, access: Access, log: TryLog, over: anyio.Event) -> Ending:
        async with self._pace.launching:  # from intent to task id: what a fault can leave in doubt stays bounded
            harness, reward_key = self._found_of(episode.stream)
            await log.intend(
                route=self._route.name, model_name=access.model_name, harness=harness, reward_key=reward_key
            )
            try:
                result = await self._post(_launch_of(episode, access), over)
            except ArenaFatalError as error:
                return Ending(status=LAUNCH_REFUSED, error=str(error))
            if result is None:
                return Ending(status=LOCAL_WAIT_CANCELLED, error="its group is closed")
            if result.terminal:
                return Ending(status=result.status, result=result)
            await log.accept(result.task_id)
        with self._pace.watching():
            return await self._watch(result.task_id, episode.stream, over)

    def _found_of(self, stream: StreamConfig) -> tuple[str, str]:
        """What runs a stream's tasks and what scores them, as it was known last."""
        live = self._live.get(stream.name)
        harness, reward = harness_of(stream, live), None if live is None else live.reward
        return "" if harness is None else str(harness), "" if reward is None else str(reward)

    async def _post(self, launch: Launch, over: anyio.Event) -> TaskResult | None:
        """POST; only 429 is answered by another one under the same session, since then nothing was launched.

        Returns:
            The answer; None where the episode's group was closed before the Arena took it.
        """
        for number in range(self._settings.request_retries):
            try:
                return await self._arena.launch(launch)
            except ArenaBusyError as error:
                await self._pause(pause_s(number, error.retry_after, datetime.now(UTC)), over)
            if over.is_set():
                return None
        return await self._arena.launch(launch)

    async def _watch(self, task_id: str, stream: StreamConfig, over: anyio.Event) -> Ending:
        """Poll a task until its terminal result, its deadline, or its group's end. An Arena that is away is waited for, beyond the deadline
        too: the result may stand there.
        """
        started_s = anyio.current_time()
        timeout_s = self._settings.task_timeout_s
        unit = zlib.crc32(task_id.encode()) / 2**32
        away, refused = "", 0
        while True:
            age_s = anyio.current_time() - started_s
            if age_s >= timeout_s and not (away and await self.away(stream)):
                break
            wait_s = self._pace.wait_s(stream.name, age_s, unit)
            if refused:
                wait_s = max(wait_s, pause_s(refused - 1, None, datetime.now(UTC)))
            due_s = anyio.current_time() + (min(wait_s, timeout_s - age_s) if age_s < timeout_s else wait_s)
            await self._pause(due_s - anyio.current_time(), over)
            if over.is_set():
                return Ending(status=LOCAL_WAIT_CANCELLED, error="its group is closed")
            self._pace.looked(anyio.current_time() - due_s)
            try:
                result = await self._arena.task_result(task_id)
            except ArenaAuthError as error:
                away, refused = str(error), refused + 1
                if refused >= _AUTH_LOOKS:
                    return Ending(status=POLL_REFUSED, error=f"{error}; refused {refused} times in a row")
                continue
            except ArenaRetryableError as error:
                away = str(error)
                continue
            except ArenaFatalError as error:
                return Ending(status=_status_of(error), error=str(error))
            away, refused = "", 0
            if result.terminal:
                self._pace.ended(stream.name, anyio.current_time() - started_s)
                return Ending(status=result.status, result=result)
        reason = f"task {task_id} had no terminal result within {timeout_s:g} s"
        return Ending(status=LOCAL_WAIT_TIMEOUT, error=f"{reason}; {away}" if away else reason)


def _status_of(error: ArenaFatalError) -> str:
    """What the audit calls the end of a task whose result can't be had."""
    match error:
        case ArenaNotFoundError():
            return "NOT_FOUND"
        case ArenaContractError():
            return "CONTRACT"
        case _:
            return POLL_REFUSED


def _launch_of(episode: Episode, access: Access) -> Launch:
    return Launch(
        stream_id=episode.stream.stream_id,
        data_id=episode.requested.data_id,
        model_name=access.model_name,
        base_url=access.base_url,
        api_key=access.api_key,
        envs=dict(access.envs),
        session_id=episode.ticket.session,
        harness=episode.stream.harness,
    )
