"""What the gateway needs from the world outside, as Protocols; ops implements them over the broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from schemas.messages.rollout import InteractionRecorded, SessionClosed, SessionOpened
from stages.gateway.conversation import Call
from stages.ports import ForwardedAnswer

SessionMessage = SessionOpened | InteractionRecorded | SessionClosed

Preprocessor = Callable[[Call], Call]
"""Changes a call's conversation before it is rendered. Applied once to each call, whatever its protocol; must give the same
result for the same messages, or turns stop extending each other."""


class RecorderError(Exception):
    """Root of what a recorder may raise."""


class RecordConflictError(RecorderError):
    """Another gateway's message stands on this key: the session is no longer this gateway's."""


class RecorderUnavailableError(RecorderError):
    """The log did not confirm in time."""


class Recorder(Protocol):
    """The run's log, as far as sessions go."""

    async def record(self, message: SessionMessage) -> None:
        """Store a message; returns when it is stored. Storing the same message again succeeds.

        Raises:
            RecordConflictError, RecorderUnavailableError.
        """
        ...

    async def read_session(self, session: str) -> list[InteractionRecorded]:
        """All recorded interactions of a session by ordinal, 0, 1, …; empty when there are none."""
        ...

    async def read_openings(self, session: str) -> list[SessionOpened]:
        """Every gateway that took the session up, oldest first."""
        ...

    async def read_closing(self, session: str) -> SessionClosed | None:
        """The session's end, if it has one."""
        ...


class Peers(Protocol):
    """The run's other gateways."""

    async def address(self, gateway: str) -> str | None:
        """The base URL of a gateway that is alive, or None."""
        ...

    async def forward(self, base_url: str, target: str, headers: Mapping[str, str], body: bytes) -> ForwardedAnswer:
        """POST a request to another gateway and pass its answer on.

        Raises:
            ConnectionError: it could not be reached.
        """
        ...


class OnlineSessions(Protocol):
    """Who gives credit to sessions that users open over HTTP, and takes their rewards."""

    async def admit(self, session: str) -> int | None:
        """The lowest weight version for a new session, or None without credit."""
        ...

    async def end(self, closed: SessionClosed, *, score: float | None, turn_rewards: Mapping[str, float]) -> None:
        """The session ended with these rewards: a score for the whole, or a map interaction id → reward, or neither."""
        ...


Clock = Callable[[], float]
"""Seconds, monotonic."""
