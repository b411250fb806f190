"""The launch stage's process: the Arena's client, registrations, the route, sessions at the gateways."""

from __future__ import annotations

import os

import anyio
import msgspec

from broker.api import ConsumerSettings
from ops.adapters import LogLaunches, LogRecorder
from ops.arena_access import arena_access
from ops.config import run_streams
from ops.secrets import GENERATION_KEY_ENV
from ops.session_calls import RemoteSessions
from ops.workers.context import WorkerContext
from pipeline.log import RunLog
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.stage import bind
from schemas.messages.sampling import GroupClosed
from schemas.topics import GROUP_CLOSED
from stages.arena_launch.groups import ClosedGroups
from stages.arena_launch.polling import Pace
from stages.arena_launch.routes import SessionGatewayRoute, make_route
from stages.arena_launch.stage import LaunchSettings, launch_episode
from stages.clients.arena.client import open_arena
from stages.clients.arena.drift import RewardGuard
from stages.clients.arena.registration import RegistrationSettings, open_registrations, session_model_name
from stages.clients.arena.secret import secret_from

STAGE = "arena_launch"


async def run_arena_launch(context: WorkerContext) -> None:
    """Launch episodes until the worker drains."""
    config, metrics = context.config, context.metrics(STAGE)
    access = arena_access(config, context.endpoints)
    run_label = f"headrace-{config.run.id}"
    gateway_url = f"http://{config.gateway.host}:{context.endpoints.gateway_port}"
    async with (
        open_arena(access) as arena,
        open_registrations(
            arena,
            RegistrationSettings(
                run_label=run_label,
                probe_interval_s=config.arena.probe_interval_s,
                cleanup_timeout_s=config.arena.cleanup_timeout_s,
            ),
        ) as registrations,
        anyio.create_task_group() as following,
    ):
        route = make_route(
            config.arena.route,
            registrations,
            access,
            run_label=run_label,
            worker=STAGE,
            generation_key=secret_from(os.environ, GENERATION_KEY_ENV),
        )
        if isinstance(route, SessionGatewayRoute):
            route.know(gateway_url)
        else:
            left = session_model_name(run_label, arena_url=access.base_url, gateway_url=gateway_url, worker=STAGE)
            await registrations.remove_orphans([left])
        groups, pace = ClosedGroups(), Pace(config.arena.poll_interval_s)
        following.start_soon(follow_closed_groups, context.log, groups)
        stage = bind(
            launch_episode,
            launches=LogLaunches(context.log, metrics),
            sessions=RemoteSessions(context.broker, LogRecorder(context.log)),
            route=route,
            arena=arena,
            settings=LaunchSettings(streams=run_streams(config), arena=config.arena, attempts=config.rollout.attempts),
            metrics=metrics,
            reward=RewardGuard(arena),
            groups=groups,
            pace=pace,
        )
        slots = config.rollout.max_concurrent_episodes
        runner = StageRunner(
            msgspec.structs.replace(stage, name=STAGE, concurrency=slots),
            context.broker,
            metrics,
            # Prefetched work of a dead worker comes back after ack_wait: hold no more than can be worked on.
            RunnerSettings(consumer=ConsumerSettings(ack_wait_s=8.0, prefetch=slots)),
        )
        context.on_drain(runner.drain)
        await runner.run()
        following.cancel_scope.cancel()


async def follow_closed_groups(log: RunLog, groups: ClosedGroups) -> None:
    """Tell episodes that wait for the Arena when their group needs them no more."""
    async with log.read([GROUP_CLOSED]) as entries:
        async for entry in entries:
            if isinstance(entry.message, GroupClosed):
                groups.close(entry.message.group)
