"""The ports of gateway and launch over a run's log: what they ask for, in messages. For workers that have an HTTP client anyway."""

from __future__ import annotations

from typing import Final

from broker.errors import BrokerError
from pipeline.log import RunLog, topic_of
from pipeline.metrics import Metrics
from pipeline.publishing import publish_patiently
from schemas.messages.rollout import EpisodeAccepted, EpisodeLaunched, InteractionRecorded, SessionClosed, SessionOpened
from schemas.messages.sampling import EpisodeRequested
from schemas.topics import EPISODE_ACCEPTED, EPISODE_LAUNCHED, INTERACTION_RECORDED, SESSION_CLOSED, SESSION_OPENED
from stages.arena_launch.ports import LaunchTry
from stages.gateway.ports import RecordConflictError, RecorderUnavailableError, SessionMessage


class LogRecorder:
    """A gateway's `Recorder` over the log."""

    def __init__(self, log: RunLog) -> None:
        self._log: Final = log

    async def record(self, message: SessionMessage) -> None:
        topic = topic_of(type(message))
        subject = topic.subject(self._log.run, message)
        try:
            published = await self._log.broker.publish(subject, topic.encode(message))
        except BrokerError as error:
            raise RecorderUnavailableError(f"{subject} is not stored: {error}") from error
        if published.standing is not None:
            raise RecordConflictError(f"{subject} stands with other bytes: another gateway has this session")

    async def read_session(self, session: str) -> list[InteractionRecorded]:
        found: list[InteractionRecorded] = []
        try:
            while (interaction := await self._log.find(INTERACTION_RECORDED, session, len(found))) is not None:
                found.append(interaction)
        except BrokerError as error:
            raise RecorderUnavailableError(f"session {session} can't be read: {error}") from error
        return found

    async def read_openings(self, session: str) -> list[SessionOpened]:
        pattern = SESSION_OPENED.subject_of(self._log.run, session) + ".*"
        try:
            async with self._log.broker.read([pattern], follow=False) as records:
                return [SESSION_OPENED.decode(record.data) async for record in records]
        except BrokerError as error:
            raise RecorderUnavailableError(f"session {session} can't be read: {error}") from error

    async def read_closing(self, session: str) -> SessionClosed | None:
        try:
            return await self._log.find(SESSION_CLOSED, session)
        except BrokerError as error:
            raise RecorderUnavailableError(f"session {session} can't be read: {error}") from error


class LogLaunches:
    """The launch stage's `LaunchLog`."""

    def __init__(self, log: RunLog, metrics: Metrics) -> None:
        self._log: Final = log
        self._metrics: Final = metrics

    async def tries(self, requested: EpisodeRequested) -> list[LaunchTry]:
        key = (requested.group, requested.slot, requested.attempt)
        found: list[LaunchTry] = []
        while (launched := await self._log.find(EPISODE_LAUNCHED, *key, len(found))) is not None:
            accepted = await self._log.find(EPISODE_ACCEPTED, *key, len(found))
            found.append(LaunchTry(launched=launched, accepted=accepted))
        return found

    async def record(self, message: EpisodeLaunched | EpisodeAccepted) -> None:
        topic = topic_of(type(message))
        await publish_patiently(
            self._log.broker, topic.subject(self._log.run, message), topic.encode(message), self._metrics
        )
