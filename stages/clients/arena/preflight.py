"""Whether a run's streams can be launched at all, found out without launching a task.

`gather` asks the Arena; `judge` decides, purely. Names of environment variables are shown, never values.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from schemas.config_arena import ArenaSettings, StreamConfig, protocol_of
from stages.clients.arena.client import ArenaClient, ModelEndpoint
from stages.clients.arena.errors import ArenaError
from stages.clients.arena.registration import Registrations, preflight_model_name
from stages.clients.arena.wire import (
    FAILED_STATUSES,
    TERMINAL_STATUSES,
    ArenaStream,
    StreamTask,
    VersionedRef,
    check_reward,
)

HISTORY_TASKS = 100


class StreamFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the Arena says about one stream; an error's text where it doesn't."""

    stream: ArenaStream | None = None
    harness_status: str | None = None
    num_rows: int | None = None
    tasks: tuple[StreamTask, ...] | None = None
    errors: tuple[str, ...] = ()


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a stream should not be launched."""

    check: str
    """stream | reward | harness | dataset | health | model_gateway."""
    text: str
    waivable: bool = False
    """`allow_unhealthy` waives it."""


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stream's preflight."""

    name: str
    stream_id: str
    harness: str
    protocol: str
    reward: str
    num_rows: int
    terminal_tasks: int
    """Among the last 100, with exactly this harness and reward."""
    failed_tasks: int
    env_names: tuple[str, ...]
    problems: tuple[Problem, ...]


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """All streams and the model gateway."""

    streams: tuple[StreamReport, ...]
    problems: tuple[Problem, ...]
    """Of no single stream."""
    allow_unhealthy: bool

    @property
    def passed(self) -> bool:
        """Whether a run may start."""
        found = [*self.problems, *(problem for stream in self.streams for problem in stream.problems)]
        return all(problem.waivable and self.allow_unhealthy for problem in found)

    @property
    def exit_code(self) -> int:
        """For scripts: 0 where the run may start."""
        return 0 if self.passed else 1


async def gather(client: ArenaClient, config: StreamConfig) -> StreamFacts:
    """Ask the Arena for everything that `judge` needs about one stream; no error stops the rest."""
    errors: list[str] = []
    stream = harness_status = num_rows = tasks = None
    try:
        stream = await client.get_stream(config.stream_id)
        harness = harness_of(config, stream)
        if harness is not None:
            harness_status = await client.harness_status(harness.key, harness.version)
    except ArenaError as error:
        errors.append(str(error))
    try:
        num_rows = len(await client.list_dataset(config.stream_id))
        tasks = tuple(await client.list_tasks(config.stream_id, limit=HISTORY_TASKS))
    except ArenaError as error:
        errors.append(str(error))
    return StreamFacts(
        stream=stream, harness_status=harness_status, num_rows=num_rows, tasks=tasks, errors=tuple(errors)
    )


def judge(config: StreamConfig, facts: StreamFacts, settings: ArenaSettings) -> StreamReport:
    """Everything that speaks against launching one stream."""
    problems = [Problem(check="stream", text=text) for text in facts.errors]
    stream = facts.stream
    harness = harness_of(config, stream)
    reward = stream.reward if stream is not None else None
    if stream is not None:
        drift = check_reward(config.name, config.expected_reward_ref, reward)
        if drift is not None:
            problems.append(Problem(check="reward", text=drift))
        if harness is None:
            text = f"stream {config.name!r}: neither the config nor the live stream names a harness"
            problems.append(Problem(check="harness", text=text))
    if facts.harness_status not in (None, "PUBLISHED"):
        text = f"stream {config.name!r}: harness {harness} is {facts.harness_status!r}, expected 'PUBLISHED'"
        problems.append(Problem(check="harness", text=text))
    if facts.num_rows == 0:
        problems.append(Problem(check="dataset", text=f"stream {config.name!r}: its dataset is empty"))
    terminal, failed = health(facts.tasks or (), harness, reward)
    if facts.tasks is not None and stream is not None:
        problems += _unhealthy(config.name, terminal, failed, settings)
    return StreamReport(
        name=config.name,
        stream_id=config.stream_id,
        harness="" if harness is None else str(harness),
        protocol=protocol_of("" if harness is None else harness.key, config.llm_protocol).value,
        reward="" if reward is None else str(reward),
        num_rows=facts.num_rows or 0,
        terminal_tasks=terminal,
        failed_tasks=failed,
        env_names=tuple(sorted(config.task_envs)),
        problems=tuple(problems),
    )


def harness_of(config: StreamConfig, stream: ArenaStream | None) -> VersionedRef | None:
    """The configured harness, else the live stream's default."""
    if config.harness:
        key, _, version = config.harness.partition("@")
        return VersionedRef(key=key, version=version)
    return None if stream is None else stream.harness


def health(tasks: Sequence[StreamTask], harness: VersionedRef | None, reward: VersionedRef | None) -> tuple[int, int]:
    """(ended, failed) among the tasks with exactly this harness and reward."""
    ours = [task for task in tasks if task.harness == harness and task.reward == reward]
    ended = [task for task in ours if task.status in TERMINAL_STATUSES]
    return len(ended), sum(task.status in FAILED_STATUSES for task in ended)


async def prove_model_gateway(
    registrations: Registrations, client: ArenaClient, endpoint: ModelEndpoint, *, part: str
) -> Problem | None:
    """One tiny generation through a registration of its own: control-plane success doesn't prove that key."""
    name = preflight_model_name(registrations.run_label, part)
    try:
        async with registrations.hold(name, endpoint, shared=False):
            await client.generate_once(name)
    except ArenaError as error:
        return Problem(check="model_gateway", text=str(error))
    return None


async def preflight(
    client: ArenaClient,
    streams: Sequence[StreamConfig],
    settings: ArenaSettings,
    *,
    registrations: Registrations | None,
    endpoint: ModelEndpoint | None,
    allow_unhealthy: bool,
    part: str = "",
) -> PreflightReport:
    """Check all streams and, where a registration would be used, the model gateway's key.

    Args:
        client: Of the Arena.
        streams: To be checked.
        settings: What a healthy stream is.
        registrations: None: nothing is registered.
        endpoint: What answers the one generation.
        allow_unhealthy: Waive health.
        part: Names this preflight's registration among all of the run's; empty: a random one that nobody can find again.
    """
    reports = [judge(stream, await gather(client, stream), settings) for stream in streams]
    problems: list[Problem] = []
    if registrations is not None and endpoint is not None:
        problem = await prove_model_gateway(registrations, client, endpoint, part=part or secrets.token_hex(8))
        problems = [problem] if problem is not None else []
    return PreflightReport(streams=tuple(reports), problems=tuple(problems), allow_unhealthy=allow_unhealthy)


def _unhealthy(name: str, terminal: int, failed: int, settings: ArenaSettings) -> list[Problem]:
    if terminal < settings.min_terminal_tasks:
        text = f"stream {name!r}: {terminal} of its last {HISTORY_TASKS} tasks ended, expected {settings.min_terminal_tasks}"
        return [Problem(check="health", text=text, waivable=True)]
    if terminal and failed / terminal >= settings.max_failure_rate:
        text = f"stream {name!r}: {failed} of {terminal} ended tasks failed, expected a rate below {settings.max_failure_rate}"
        return [Problem(check="health", text=text, waivable=True)]
    return []
