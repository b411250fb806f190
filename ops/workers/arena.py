"""The launch stage's process: the Arena's client, registrations, the route, sessions at the gateways."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import msgspec

from ops.agents.runner import ADAPTERS, open_agents
from ops.arena_access import arena_access
from ops.config import run_streams
from ops.rollout_adapters import LogLaunches, LogRecorder
from ops.secrets import GENERATION_KEY_ENV
from ops.session_calls import RemoteSessions
from ops.topology import consumer_settings
from ops.troubles import ARENA_LABEL
from ops.workers.context import WorkerContext
from ops.workers.orphans import left_names
from ops.workers.preflights import marks_folder, remove_left_preflights
from ops.workers.slots import WorkerSlot, claim_slot, hold_if_dead
from pipeline.log import RunLog
from pipeline.metrics import Metrics
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.stage import bind
from schemas.config_arena import StreamRunner
from schemas.messages.sampling import GroupClosed
from schemas.topics import GROUP_CLOSED
from stages.arena_launch.arena_runner import ArenaRunner
from stages.arena_launch.groups import ClosedGroups
from stages.arena_launch.ports import EpisodeRunner
from stages.arena_launch.routes import SessionGatewayRoute, make_route
from stages.arena_launch.stage import LaunchSettings, launch_episode
from stages.clients.arena.client import ArenaClient, open_arena
from stages.clients.arena.drift import RewardGuard
from stages.clients.arena.registration import (
    Registrations,
    RegistrationSettings,
    is_name_of_worker,
    open_registrations,
)
from stages.clients.arena.secret import secret_from

STAGE = "arena_launch"
_SILENT_S = 10.0


async def run_arena_launch(context: WorkerContext) -> None:
    """Launch episodes until the worker drains."""
    config, metrics = context.config, context.metrics(STAGE)
    streams = run_streams(config)
    async with anyio.create_task_group() as following, AsyncExitStack() as stack:
        runners: dict[StreamRunner, EpisodeRunner] = {}
        if any(stream.runner is StreamRunner.ARENA for stream in streams.values()):
            slot = stack.enter_context(
                claim_slot(context.folder.path / "workers", STAGE, host=context.endpoints.node or None)
            )
            runners[StreamRunner.ARENA] = await stack.enter_async_context(_open_arena_runner(context, slot, metrics))
        if any(stream.runner in ADAPTERS for stream in streams.values()):
            agents = await stack.enter_async_context(open_agents(streams, config.arena, context.payloads))
            runners.update(dict.fromkeys(ADAPTERS, agents))
        groups = ClosedGroups()
        following.start_soon(follow_closed_groups, context.log, groups)
        stage = bind(
            launch_episode,
            launches=LogLaunches(context.log, metrics),
            sessions=RemoteSessions(context.broker, LogRecorder(context.log)),
            runners=runners,
            settings=LaunchSettings(streams=streams, arena=config.arena, attempts=config.rollout.attempts),
            metrics=metrics,
            groups=groups,
        )
        slots = config.rollout.max_concurrent_episodes
        runner = StageRunner(
            msgspec.structs.replace(stage, name=STAGE, concurrency=slots),
            context.broker,
            metrics,
            RunnerSettings(consumer=consumer_settings(STAGE, config)),
        )
        context.on_drain(runner.drain)
        await runner.run()
        following.cancel_scope.cancel()


@asynccontextmanager
async def _open_arena_runner(context: WorkerContext, slot: WorkerSlot, metrics: Metrics) -> AsyncGenerator[ArenaRunner]:
    """The Arena's client, this worker's registrations and the route; what dead workers left is removed."""
    config = context.config
    access = arena_access(config, context.endpoints)
    run_label = f"headrace-{config.run.id}"
    bound = f"http://{config.gateway.host}:{context.endpoints.gateway_port}"
    gateway_url = config.gateway.public_url or bound  # as sessions say it

    async with (
        open_arena(access, heard=_told_in(metrics)) as arena,
        anyio.create_task_group() as telling,
        open_registrations(
            arena,
            RegistrationSettings(
                run_label=run_label,
                probe_interval_s=config.arena.probe_interval_s,
                cleanup_timeout_s=config.arena.cleanup_timeout_s,
            ),
        ) as registrations,
    ):
        telling.start_soon(_tell_silence, arena, metrics)
        route = make_route(
            config.arena.route,
            registrations,
            access,
            run_label=run_label,
            worker=slot.name,
            generation_key=secret_from(os.environ, GENERATION_KEY_ENV),
        )
        if isinstance(route, SessionGatewayRoute):
            route.know(gateway_url)
        await _take_up(context, slot, registrations, access.base_url)
        await remove_left_preflights(registrations, marks_folder(context.folder.path))
        yield ArenaRunner(arena, route, config.arena, reward=RewardGuard(arena), place=access.base_url)
        telling.cancel_scope.cancel()


async def _take_up(context: WorkerContext, slot: WorkerSlot, registrations: Registrations, arena_url: str) -> None:
    """Remove what dead workers left registered for any gateway, and take up what this slot's former worker left in use."""

    def owner(name: str) -> str:
        for worker in (slot.name, *slot.dead):
            if is_name_of_worker(name, registrations.run_label, arena_url=arena_url, worker=worker):
                return worker
        return ""

    left = await left_names(context.log, lambda name: bool(owner(name)))
    for name in left.used:
        if owner(name) == slot.name:
            registrations.inherit(name)
    for name in left.unused:
        if (worker := owner(name)) == slot.name:
            await registrations.remove_orphans([name])
            continue
        with hold_if_dead(context.folder.path / "workers", worker) as is_dead:
            if is_dead:
                await registrations.remove_orphans([name])


def _told_in(metrics: Metrics) -> Callable[[str], None]:
    """Tell in the stage's reports that the Arena does not answer, until it does."""

    def heard(problem: str) -> None:
        if problem:
            metrics.labels[ARENA_LABEL] = problem
        else:
            metrics.labels.pop(ARENA_LABEL, None)

    return heard


async def _tell_silence(arena: ArenaClient, metrics: Metrics) -> None:
    """Tell of an Arena that takes requests and answers none, long before they time out; for ever."""
    while True:
        if (silent_s := arena.silent_s()) > _SILENT_S:
            metrics.labels[ARENA_LABEL] = f"no answer for {silent_s:.0f} s"
        await anyio.sleep(1.0)


async def follow_closed_groups(log: RunLog, groups: ClosedGroups) -> None:
    """Tell episodes that wait for the Arena when their group needs them no more."""
    async with log.read([GROUP_CLOSED]) as entries:
        async for entry in entries:
            if isinstance(entry.message, GroupClosed):
                groups.close(entry.message.group)
