"""The gateway's `OnlineSessions` over the log: claims, rewards, ends. What is decided is decided by the log's order alone.

    open ─▶ session.claimed ─▶ (fold) ─▶ episode.launched ─▶ session.opened ─▶ calls … ─▶ session.closed ─▶ episode.ended
                                           reward ─▶ session.rewarded ────────────────────────┘

Every gateway follows all of it: one that dies is missed by nobody, since any other one ends what is due (`sweep`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio
import anyio.abc
import msgspec
import structlog

from broker.errors import BrokerError
from ops.online.ends import EndSettings, end_of, is_settled, launch_of, unclaimed, waiting_for
from ops.online.view import SlotView
from pipeline.log import RunLog, RunPayloads, topic_of
from schemas.config_arena import StreamConfig
from schemas.messages.rollout import EpisodeEnded, SessionClaimed, SessionClosed, SessionRewarded
from schemas.topics import EPISODE_ENDED
from stages.gateway.deadline import log_deadline
from stages.gateway.errors import (
    BusyError,
    InvalidRequestError,
    SessionEndedError,
    UnavailableError,
    UnknownRouteError,
)
from stages.gateway.ports import Asked, Claimed, OnlineState, Peers, Rewards
from stages.online.slots import Held

log = structlog.get_logger("headrace.online")
_LOG_DEADLINE_S: Final = 30.0
_SWEEP_S: Final = 1.0
_MAX_WAITING: Final = 1024

CloseSession = Callable[[str], Awaitable[SessionClosed]]


class OnlineService:
    """One gateway's part in the run's online streams."""

    def __init__(
        self,
        run_log: RunLog,
        payloads: RunPayloads,
        *,
        gateway: str,
        streams: Mapping[str, StreamConfig],
        attempts: int,
        idle_expiry_s: float,
        peers: Peers | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._log: Final = run_log
        self._payloads: Final = payloads
        self._gateway: Final = gateway
        self._ends: Final = EndSettings(streams=streams, attempts=attempts)
        self._idle_expiry_s: Final = idle_expiry_s
        self._peers: Final = peers
        self._now: Final = now
        self._view: Final = SlotView(run_log, streams)
        self._claiming: Final = anyio.Lock()
        self._num_waiting = 0
        self._leaving = False
        self._orphans: Final[dict[str, float]] = {}
        """Open sessions whose gateway is gone → since when that is known."""
        self.num_refused = 0

    async def run(
        self, close_session: CloseSession, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Follow the log and end what is due, for ever; started once the log's past is known."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._view.follow)
            await self._view.catch_up()
            task_status.started()
            while True:
                await anyio.sleep(_SWEEP_S)
                try:
                    await self.sweep(close_session)
                except (BrokerError, UnavailableError) as error:
                    log.warning("ends of online sessions are put off: the log is away", error=str(error))

    def gauges(self) -> dict[str, float]:
        """Figures for status."""
        slots = self._view.slots
        return {
            "online_free_slots": sum(slots.num_free(name) for name in self._ends.streams),
            "online_sessions": sum(held.closed is None for held in slots.held.values()),
            "online_without_reward": sum(held.closed is not None for held in slots.held.values()),
            "online_refused": self.num_refused,
        }

    def waits_for(self) -> str:
        """What the slots wait for; empty when for nothing."""
        return waiting_for(self._view.slots, tuple(self._ends.streams))

    async def claim(self, asked: Asked) -> Claimed | None:
        stream = self._stream(asked.stream)
        claim = asked.request_id or f"auto-{secrets.token_hex(8)}"
        deadline_s = anyio.current_time() + asked.wait_s
        if self._num_waiting >= _MAX_WAITING:
            raise BusyError(f"{_MAX_WAITING} requests wait for credit already", retry_after_s=5)
        self._num_waiting += 1
        try:
            while True:
                if self._leaving:
                    raise UnavailableError(
                        "this gateway ends: ask another one of the run, or again when the run goes on", retry_after_s=5
                    )
                offered = self._view.offered
                async with self._claiming:
                    found = await self._try(claim, stream, asked.task)
                if found is not None:
                    return found
                if self._view.slots.find(stream, asked.task) is not None:
                    continue  # it was offered while a claim of ours was void
                with anyio.move_on_at(deadline_s) as scope:
                    await offered.wait()
                if scope.cancelled_caught:
                    self.num_refused += 1
                    return None
        finally:
            self._num_waiting -= 1

    def leave(self) -> None:
        """The gateway ends: who waits for credit is told to ask elsewhere."""
        self._leaving = True
        self._view.wake()

    def plays(self, session: str) -> bool:
        return session in self._view.slots.held

    async def state(self, session: str) -> OnlineState | None:
        held = self._view.slots.held.get(session)
        if held is not None:
            return OnlineState(
                session=session,
                stream=held.requested.stream,
                group=held.requested.group,
                slot=held.requested.slot,
                state="open" if held.closed is None else "closed",
                score=held.score,
                turn_rewards=held.turn_rewards,
                group_closed=held.group_closed,
            )
        ended = await self._ended(session)
        if ended is None:
            return None
        return OnlineState(
            session=session,
            stream=ended.stream,
            group=ended.group,
            slot=ended.slot,
            state="ended",
            score=ended.score,
            turn_rewards=ended.turn_rewards,
            outcome=f"{ended.outcome.value}: {ended.status}",
        )

    async def reward(self, session: str, rewards: Rewards) -> None:
        with log_deadline(_LOG_DEADLINE_S, BrokerError):
            while (held := self._view.slots.held.get(session)) is not None:
                said = SessionRewarded(
                    session=session,
                    ordinal=held.num_rewards,
                    score=rewards.score,
                    turn_rewards=dict(rewards.turn_rewards),
                    final=rewards.final,
                    discard=rewards.discard,
                )
                sequence, own = await self._publish(said)
                await self._view.seen(sequence)
                if own:
                    await self._settle(session)
                    ended = await self._ended(session)
                    if ended is not None and not _holds(ended, rewards):
                        break
                    return
            if await self._ended(session) is None:
                raise UnknownRouteError(f"no online session {session!r}")
            raise SessionEndedError(f"the episode of session {session} has ended: its reward stands")

    async def ended(self, closed: SessionClosed) -> None:
        if closed.session not in self._view.slots.held:
            return
        with log_deadline(_LOG_DEADLINE_S, BrokerError):
            await self._view.catch_up()
            await self._settle(closed.session)

    async def sweep(self, close_session: CloseSession) -> None:
        """End what is due and nobody ended: slots without a session, sessions without a reward, sessions of dead gateways."""
        now_s, slots = self._now(), self._view.slots
        for ended in unclaimed(slots, self._ends, now_s):
            await self._publish(ended)
        for requested in list(slots.owed.values()):
            await self._publish(requested)
        for held in list(slots.held.values()):
            if held.closed is not None:
                await self._settle(held.session)
            elif await self._is_given_up(held, now_s):
                log.warning("a session whose gateway is gone was not taken up again and ends", session=held.session)
                await close_session(held.session)
        for session in [one for one in self._orphans if one not in slots.held]:
            del self._orphans[session]

    def _stream(self, name: str) -> str:
        streams = self._ends.streams
        if name in streams:
            return name
        if not name and len(streams) == 1:
            return next(iter(streams))
        raise InvalidRequestError(f"stream: expected one of {', '.join(sorted(streams))}, found {name[:100]!r}")

    async def _try(self, claim: str, stream: str, task: str) -> Claimed | None:
        """One look at the slots, and a claim where one would be granted. From the claim on it can't be cancelled: a slot that was
        given belongs to whoever asked.
        """
        slots = self._view.slots
        times, session = slots.asked(claim)
        if session:
            return await self._claimed(session, again=True)
        if slots.find(stream, task) is None:
            return None
        with anyio.CancelScope(shield=True), log_deadline(_LOG_DEADLINE_S, BrokerError):
            claimed = SessionClaimed(claim=claim, ordinal=times, stream=stream, task=task, gateway=self._gateway)
            sequence, _ = await self._publish(claimed)
            await self._view.seen(sequence)
            _, session = slots.asked(claim)
            return await self._claimed(session, again=False) if session else None

    async def _claimed(self, session: str, *, again: bool) -> Claimed:
        held = self._view.slots.held.get(session)
        if held is None or held.closed is not None:
            raise SessionEndedError(f"session {session} of this request has ended")
        await self._publish(launch_of(held))
        requested = held.requested
        task = None if requested.prompt is None else bytes(await self._payloads.get(requested.prompt))
        return Claimed(
            session=session,
            min_version=requested.min_version,
            stream=requested.stream,
            group=requested.group,
            slot=requested.slot,
            data_id=requested.data_id if task is not None else held.task,
            tags=requested.tags,
            evaluation=requested.evaluation,
            task=None if task is None else msgspec.Raw(task),
            again=again,
        )

    async def _settle(self, session: str) -> None:
        """Say the end of a session's episode, if it is time. Every gateway would say the same, byte for byte."""
        held = self._view.slots.held.get(session)
        if held is None or held.closed is None:
            return
        if not is_settled(held, self._ends.streams[held.requested.stream], self._now()):
            return
        sequence = 0
        for message in end_of(held, held.closed, self._ends):
            sequence, _ = await self._publish(message)
        await self._view.seen(sequence)

    async def _is_given_up(self, held: Held, now_s: float) -> bool:
        alive = held.gateway == self._gateway or (
            self._peers is not None and await self._peers.address(held.gateway) is not None
        )
        if alive:
            self._orphans.pop(held.session, None)
            # Claimed here or elsewhere, and never opened: whoever asked went away or met a fault.
            return not held.opened and now_s - held.seen_s >= self._idle_expiry_s
        since_s = self._orphans.setdefault(held.session, now_s)
        return now_s - max(since_s, held.seen_s) >= self._idle_expiry_s

    async def _ended(self, session: str) -> EpisodeEnded | None:
        group, *numbers = session.rsplit("-", 3)
        if len(numbers) != 3 or not all(one.isdecimal() for one in numbers):
            return None
        ended = await self._log.find(EPISODE_ENDED, group, int(numbers[0]), int(numbers[1]))
        return ended if ended is not None and ended.stream in self._ends.streams else None

    async def _publish(self, message: msgspec.Struct) -> tuple[int, bool]:
        """Its place on the log, and whether it is the caller's: another gateway's, said first, holds."""
        topic = topic_of(type(message))
        published = await self._log.broker.publish(topic.subject(self._log.run, message), topic.encode(message))
        return published.sequence, published.standing is None


def _holds(ended: EpisodeEnded, rewards: Rewards) -> bool:
    """Whether an episode's end has what was said last."""
    if rewards.discard:
        return ended.score is None
    same_score = rewards.score is None or ended.score == rewards.score
    return same_score and all(ended.turn_rewards.get(name) == value for name, value in rewards.turn_rewards.items())
