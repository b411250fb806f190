"""Fakes of what the launch stage needs: gateway sessions, the log, a route, an Arena that follows a script."""

from contextlib import asynccontextmanager

import pytest

from pipeline.errors import RetryableError
from pipeline.metrics import Metrics
from schemas.config_arena import ArenaSettings, StreamConfig, StreamRunner
from schemas.messages.rollout import EpisodeLaunched, SessionClosed
from schemas.messages.sampling import EpisodeRequested
from stages.arena_launch.arena_runner import ArenaRunner
from stages.arena_launch.ports import Access, LaunchTry, SessionTicket
from stages.arena_launch.stage import LaunchSettings, launch_episode
from stages.clients.arena.secret import Secret
from stages.clients.arena.wire import ArenaStream, TaskResult


def result(status: str, score: float | None = None, task_id: str = "task-1", raw: object = None) -> TaskResult:
    return TaskResult(
        task_id=task_id, status=status, score=score, raw=raw, artifacts_uri="a://1", trace_id="tr", computed_at="now"
    )


class World:
    """Everything outside of the stage; `events` is what happened, in order."""

    name = "session_gateway"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.recorded: list[LaunchTry] = []
        self.launch_answers: list = [result("PENDING")]
        self.results: list = [result("DONE", 1.0)]
        self.closed: dict[str, dict] = {}
        self.receipts: list = []
        self.launches: list = []
        self.refused_reach: Exception | None = None
        self.away: Exception | None = None
        self.num_looks = 0
        self.streams = {"s": StreamConfig(name="s", stream_id="arena-s")}
        self.settings: dict = {}
        self.ports: dict = {}
        self.metrics = Metrics("run", "arena_launch")
        self.pauses: list[float] = []
        self.served_version = 3
        self.asked_versions: list[int] = []

    def requested(self, **changes) -> EpisodeRequested:
        return EpisodeRequested(
            **{"group": "g0000001", "slot": 2, "attempt": 0, "stream": "s", "data_id": "d", **changes}
        )

    async def run(self, requested: EpisodeRequested | None = None):
        arena = ArenaSettings(**{"poll_interval_s": 0.01, **self.settings})
        ports = {"pause": self._pause, "place": "http://arena", "asked_again_s": 0.0, **self.ports}
        groups = ports.pop("groups", None)
        return await launch_episode(
            requested or self.requested(),
            launches=self, sessions=self, groups=groups, metrics=self.metrics,
            runners={StreamRunner.ARENA: ArenaRunner(self, self, arena, **ports)},
            settings=LaunchSettings(streams=self.streams, arena=arena, attempts=3),
        )  # fmt: skip

    async def _pause(self, delay_s: float, _over) -> None:
        self.pauses.append(delay_s)

    # sessions
    async def serves(self, version: int) -> bool:
        self.asked_versions.append(version)
        return version <= self.served_version

    async def open(self, session: str, *, min_version: int) -> SessionTicket:
        self.events.append(f"open {session} {min_version}")
        return SessionTicket(session=session, token=Secret("t"), base_url="http://gateway")

    async def close(self, session: str) -> SessionClosed:
        self.events.append(f"close {session}")
        return SessionClosed(**{"session": session, "num_interactions": 1, **self.closed})

    # log
    async def tries(self, _requested) -> list[LaunchTry]:
        return self.recorded

    async def record(self, message) -> None:
        kind = "intent" if isinstance(message, EpisodeLaunched) else "accepted"
        self.events.append(f"{kind} {message.launch_try}")
        if kind == "intent":
            self.recorded = [*self.recorded, LaunchTry(launched=message, accepted=None)]
        else:
            self.recorded = [*self.recorded[:-1], LaunchTry(launched=self.recorded[-1].launched, accepted=message)]

    # route
    @asynccontextmanager
    async def reach(self, _stream, ticket):
        self.events.append(f"reach {ticket.session}")
        if self.refused_reach is not None:
            raise self.refused_reach
        yield Access(model_name="stream-areal-x", base_url="http://arena/api", api_key=Secret("k"), envs={})
        self.events.append("leave")

    @asynccontextmanager
    async def resume(self, launched):
        self.events.append(f"resume {launched.model_name}")
        yield

    async def suspect(self, launched) -> None:
        self.events.append(f"suspect {launched.model_name}")

    async def forget(self, launched) -> None:
        self.events.append(f"forget {launched.model_name}")

    # arena
    async def get_stream(self, stream_id: str):
        self.num_looks += 1
        if self.away is not None:
            raise self.away
        return ArenaStream(stream_id=stream_id, status="ACTIVE", harness=None, reward=None)

    async def launch(self, launch) -> TaskResult:
        self.events.append("POST")
        self.launches.append(launch)
        return self._next(self.launch_answers)

    async def task_result(self, task_id: str) -> TaskResult:
        self.events.append(f"poll {task_id}")
        return self._next(self.results)

    async def receipt(self, _path: str, _task_id: str) -> object:
        return self._next(self.receipts)

    def _next(self, answers: list):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            return answer()
        return answer

    def killed(self) -> Exception:
        """What a worker's death looks like from here: the message comes again."""
        return RetryableError("killed")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def answer():
    return result
