"""What the gateway needs from the world outside, as Protocols; ops implements them over the broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from pipeline.errors import RetryableError
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


class RecorderUnavailableError(RecorderError, RetryableError):
    """The log did not confirm or answer in time: no fault of what was worked on."""


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


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a user's own service asks for when it opens a session."""

    request_id: str = ""
    """Its own name for the request: asking again with it gives the same session."""
    stream: str = ""
    """Empty where the run has one online stream."""
    task: str = ""
    """Its own name for the task: sessions with the same one share a group. Where rows are handed out: the row it wants."""
    wait_s: float = 0.0
    """How long to wait for credit."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that a session plays from now on."""

    session: str
    min_version: int
    """Lowest weight version that it may be sampled with."""
    stream: str
    group: str
    slot: int
    data_id: str
    tags: list[str]
    task: msgspec.Raw | None = None
    """JSON of the row that is handed out; None where the service brings its own."""
    evaluation: bool = False
    """Its tokens are never trained on."""
    again: bool = False
    """It was claimed before by the same request."""


class Rewards(msgspec.Struct, frozen=True, kw_only=True):
    """What a service says of a session: a score of the whole, or interaction id → reward, or that it is to be discarded."""

    score: float | None = None
    turn_rewards: Mapping[str, float] = {}
    final: bool = True
    """No further reward follows."""
    discard: bool = False


class OnlineState(msgspec.Struct, frozen=True, kw_only=True):
    """How an online session is."""

    session: str
    stream: str
    group: str
    slot: int
    state: str
    """`open`, `closed` (it waits for its reward) or `ended`."""
    score: float | None = None
    turn_rewards: Mapping[str, float] = {}
    group_closed: bool = False
    """Its group was closed before: it is served, and no longer trained on."""
    outcome: str = ""
    """Of the ended episode: its class and status."""


class OnlineSessions(Protocol):
    """The slots that users' own services play; every gateway of a run sees the same ones."""

    async def claim(self, asked: Asked) -> Claimed | None:
        """A slot for a new session, or None where there is no credit for one within `wait_s`.

        Raises:
            InvalidRequestError: no such stream.
            SessionEndedError: the request had a session, and it is over.
            UnavailableError: the log did not answer in time.
        """
        ...

    async def state(self, session: str) -> OnlineState | None:
        """How a session is; None when it is none of an online stream."""
        ...

    async def reward(self, session: str, rewards: Rewards) -> None:
        """Put a reward on the log; a later one goes before a former one. Possible until the episode has ended.

        Raises:
            SessionEndedError: the episode has ended.
            UnknownRouteError: no online session.
            UnavailableError: the log did not answer in time.
        """
        ...

    async def ended(self, closed: SessionClosed) -> None:
        """A session has ended: its episode ends too, or waits for a reward. Others' sessions are passed over."""
        ...

    def plays(self, session: str) -> bool:
        """Whether this is an online session whose episode has not ended."""
        ...


Clock = Callable[[], float]
"""Seconds, monotonic."""
