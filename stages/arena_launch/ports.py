"""What the launch stage needs from the world outside."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio
import msgspec

from schemas.config_arena import StreamConfig
from schemas.messages.rollout import EpisodeAccepted, EpisodeLaunched, SessionClosed
from schemas.messages.sampling import EpisodeRequested
from stages.clients.arena.client import Launch
from stages.clients.arena.secret import Secret
from stages.clients.arena.wire import ArenaStream, TaskResult


class SessionTicket(msgspec.Struct, frozen=True, kw_only=True):
    """An open session at a gateway."""

    session: str
    token: Secret
    """Names the session and lets it generate; nothing else."""
    base_url: str
    """The gateway, without `/v1` and without a trailing slash."""


class Sessions(Protocol):
    """The run's gateways."""

    async def serves(self, version: int) -> bool:
        """Whether an engine of theirs samples with this weight version or a newer one by now.

        Raises:
            RetryableError: no gateway answered.
        """
        ...

    async def open(self, session: str, *, min_version: int) -> SessionTicket:
        """Open a session; opening it again gives a new token for the same session.

        Raises:
            RetryableError: no gateway answered.
        """
        ...

    async def close(self, session: str) -> SessionClosed:
        """End a session: further calls get 410 and are never recorded. Closing it again gives the same answer.

        Raises:
            RetryableError: no gateway answered.
        """
        ...


class LaunchTry(msgspec.Struct, frozen=True, kw_only=True):
    """One try of an attempt, as the log knows it."""

    launched: EpisodeLaunched
    accepted: EpisodeAccepted | None


class LaunchLog(Protocol):
    """The tries of an attempt on the run's log."""

    async def tries(self, requested: EpisodeRequested) -> list[LaunchTry]:
        """All tries, the oldest first."""
        ...

    async def record(self, message: EpisodeLaunched | EpisodeAccepted) -> None:
        """Returns when it is stored."""
        ...


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One try of an attempt, with all that it needs to start."""

    requested: EpisodeRequested
    stream: StreamConfig
    ticket: SessionTicket


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a try, apart from what its session recorded."""

    status: str
    """The Arena's terminal status, or one of ours."""
    error: str = ""
    result: TaskResult | None = None
    """The terminal result; None where there is none: a system failure."""
    turn_rewards: Mapping[str, float] = {}
    """completion id → reward, where the agent gave a map instead of one number."""


class TryLog(Protocol):
    """What a runner says about the try that it starts; each returns when it is on the log."""

    async def intend(self, *, route: str, model_name: str, harness: str, reward_key: str = "") -> None:
        """From now on something outside may run for this try.

        Args:
            route: How it reaches the model.
            model_name: What it calls the model; names what is registered for it.
            harness: What runs; empty where it is not known.
            reward_key: What will score it; empty where it is not known.
        """
        ...

    async def accept(self, task_id: str) -> None:
        """It runs under this id, by which another worker can take it over."""
        ...


class EpisodeRunner(Protocol):
    """Who plays episodes: the Arena, or a pool of processes with the user's own agents.

    A try is played inside a context: the session is closed, and what it recorded is looked at, before the context ends.
    """

    async def refusal(self, stream: StreamConfig) -> str:
        """Why nothing of this stream may be started; empty: nothing speaks against it.

        Raises:
            ArenaError: it could not be found out.
        """
        ...

    async def away(self, stream: StreamConfig) -> str:
        """What this stream's episodes need and what does not answer now, in words that tell its place and error; empty: it answers."""
        ...

    def play(self, episode: Episode, log: TryLog, over: anyio.Event) -> AbstractAsyncContextManager[Ending]:
        """Start a try and wait for its end, its time limit, or `over` (its group needs it no more).

        Raises:
            RetryableError: whether it was started is unknown, or something it needs is away.
        """
        ...

    def take_over(
        self, launched: EpisodeLaunched, task_id: str, stream: StreamConfig, over: anyio.Event
    ) -> AbstractAsyncContextManager[Ending]:
        """Wait for the end of a try that another worker started and that was accepted."""
        ...

    async def disown(self, launched: EpisodeLaunched) -> None:
        """Nobody waits any more for a try that may have been started: remove what it registered for itself alone."""
        ...

    async def explain(self, launched: EpisodeLaunched, ending: Ending, closed: SessionClosed) -> object:
        """The episode's own receipt, for a failure whose cause the status does not name; None where there is none."""
        ...


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness reaches the model."""

    model_name: str
    base_url: str
    api_key: Secret
    envs: Mapping[str, str]
    """May hold credentials."""

    def __repr__(self) -> str:
        return f"Access(model_name={self.model_name!r}, envs={sorted(self.envs)})"


class Route(Protocol):
    """How a harness in the Arena reaches a session (see ArenaRoute)."""

    @property
    def name(self) -> str: ...

    def reach(self, stream: StreamConfig, ticket: SessionTicket) -> AbstractAsyncContextManager[Access]:
        """What to launch with; what it registers lives as long as the context."""
        ...

    def resume(self, launched: EpisodeLaunched) -> AbstractAsyncContextManager[None]:
        """Keep alive what a former process registered for a task that still runs."""
        ...

    async def suspect(self, launched: EpisodeLaunched) -> None:
        """Its harness failed without reaching the model: look at once whether what it goes through still stands."""
        ...

    async def forget(self, launched: EpisodeLaunched) -> None:
        """Remove what a former try registered for itself alone; advisory."""
        ...


class RewardCheck(Protocol):
    """Whether the reward that scores a stream is the expected one, and what the stream is."""

    async def check(self, stream: StreamConfig) -> ArenaStream | None:
        """The live stream, when its reward is the expected one or none is pinned; None where it is not known.

        Raises:
            RewardDriftError: It is another one.
            ArenaError: The stream can't be read.
        """
        ...


class Arena(Protocol):
    """The calls of the Arena that the stage makes."""

    async def get_stream(self, stream_id: str) -> ArenaStream: ...

    async def launch(self, launch: Launch) -> TaskResult: ...

    async def task_result(self, task_id: str) -> TaskResult: ...

    async def receipt(self, path: str, task_id: str) -> object: ...
