"""`headrace worker engine`: one process that owns one server, or looks after one that was there before."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import anyio
import msgspec

from broker.embedded import write_private
from ops.config import RunConfig
from ops.engines.announcing import Announcer
from ops.engines.clients import engine_client
from ops.engines.commands import key_file_text, server_command
from ops.engines.life import EngineLife, LifeSettings, RunningServer
from ops.engines.plan import MODEL_NAME, EnginePlan, server_settings
from ops.engines.server_process import free_port, server_process
from ops.engines.weights import FollowedWeights
from ops.policy_folder import policy_folder
from ops.training_checks import publishes_adapter
from ops.workers.context import WorkerContext
from ops.workers.turns import turn_giver
from pipeline.metrics import Metrics, worker_name
from pipeline.publishing import publish_patiently
from schemas.config import EngineKind
from schemas.errors import ConfigError
from schemas.messages.engines import EngineAnnouncement, EngineState
from schemas.messages.training import WeightsLoaded
from schemas.topics import WEIGHTS_LOADED
from stages.ports import InferenceEngine, SwapMode
from stages.weights.receive import Receiver


async def run_engine(context: WorkerContext) -> None:
    """Serve with one engine until the worker drains.

    Raises:
        EngineGivenUpError: its server did not start, several times in a row.
        ConfigError: no engine was named.
    """
    plan = context.engine
    if plan is None:
        raise ConfigError("worker engine: expected --name, or --url of a server that runs already")
    config, metrics = context.config, context.metrics("engine")
    log_file = "" if plan.attached else str(context.folder.logs / f"{plan.name}.server.log")
    first = EngineAnnouncement(
        name=plan.name,
        kind=plan.kind.value,
        model=MODEL_NAME,
        state=EngineState.STARTING,
        capacity=config.engine.max_running_requests,
        attached=plan.attached,
        worker=worker_name(),
        log_file=log_file,
    )
    announcer = Announcer(context.broker, first, metrics, now=context.now)
    life = EngineLife(
        announcer,
        life_settings(config),
        start=lambda: _attached(plan.url) if plan.attached else _started(context, plan, log_file),
        connect=lambda url: engine_client(config, context.folder, plan.kind, plan.name, url),
        make_weights=partial(_weights, context, metrics),
        draining=context.draining,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(announcer.run)
        await life.run()
        tasks.cancel_scope.cancel()


def life_settings(config: RunConfig) -> LifeSettings:
    """How patient a worker is with its server."""
    return LifeSettings(
        start_timeout_s=config.engine.start_timeout_s, max_failed_starts=config.engine.max_failed_starts
    )


@asynccontextmanager
async def _started(context: WorkerContext, plan: EnginePlan, log_file: str) -> AsyncGenerator[RunningServer]:
    section = context.config.engine
    port = section.ports[plan.slot] if plan.slot < len(section.ports) else free_port(section.host)
    settings = server_settings(
        section,
        plan,
        model=policy_folder(context.config, context.folder),
        max_context=context.config.rollout.max_context_tokens,
        port=port,
        api_key=os.environ.get(section.api_key_env, "") if section.api_key_env else "",
        lora=context.config.training.lora if publishes_adapter(context.config.training, section) else None,
    )
    if settings.api_key and plan.kind is EngineKind.SGLANG:
        key_file = context.folder.path / f"{plan.name}.key.yaml"
        write_private(key_file, key_file_text(settings.api_key))
        settings = msgspec.structs.replace(settings, key_file=str(key_file))
    argv, env = server_command(plan.kind, settings)
    async with server_process(argv, env, log_file) as process:
        yield RunningServer(url=f"http://{section.host}:{port}", ended=process.wait)


def _attached(url: str) -> AbstractAsyncContextManager[RunningServer]:
    async def never() -> str:
        await anyio.sleep_forever()
        return ""

    @asynccontextmanager
    async def found() -> AsyncGenerator[RunningServer]:
        yield RunningServer(url=url.rstrip("/"), ended=never)

    return found()


def _weights(
    context: WorkerContext,
    metrics: Metrics,
    engine: InferenceEngine,
    incarnation: str,
    on_quarantine: Callable[[EngineState, str], None],
    on_loaded: Callable[[WeightsLoaded], Awaitable[object]],
) -> FollowedWeights:
    async def say(loaded: WeightsLoaded) -> None:
        await on_loaded(loaded)
        subject = WEIGHTS_LOADED.subject(context.broker.run, loaded)
        await publish_patiently(context.broker, subject, WEIGHTS_LOADED.encode(loaded), metrics)

    section, turn = context.config.engine, anyio.Lock()
    receiver = Receiver(
        engine,
        context.payloads,
        cache_dir=section.weights_cache or str(context.folder.cache / "weights"),
        mode=SwapMode(section.swap),
        incarnation=incarnation,
        say=say,
        metrics=metrics,
        on_state=on_quarantine,
        turn=turn,
        now=context.now,
    )
    giver = turn_giver(context, engine, incarnation, turn)
    return FollowedWeights(context.log, receiver, beside=None if giver is None else giver.run)
