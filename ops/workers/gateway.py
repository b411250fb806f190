"""The gateway's process: the engine in it, the HTTP server, sessions for launchers, new weights as they come."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import cast

import anyio
import structlog

from ops.config import run_streams
from ops.engines.plan import has_servers
from ops.gateway_peers import NAME_LABEL, URL_LABEL, LivePeers
from ops.online.service import OnlineService
from ops.policy_folder import policy_folder
from ops.rollout_adapters import LogRecorder
from ops.secrets import CONTROL_KEY_ENV, GENERATION_KEY_ENV
from ops.session_calls import serve_sessions
from ops.workers.context import WorkerContext
from ops.workers.routed import Sampling, routed_engines
from ops.workers.turns import turn_giver
from pipeline.functions import load_function
from pipeline.metrics import Metrics
from schemas.config import EngineKind
from schemas.config_arena import StreamRunner
from schemas.errors import ConfigError
from schemas.messages.training import WeightsPublished
from schemas.topics import WEIGHTS_PUBLISHED
from stages.clients.forwarding import HttpForwarder, forwarding_client
from stages.engine.gate import GatedEngine
from stages.engine.scripted import Script, ScriptedEngine
from stages.gateway.gateway import Gateway
from stages.gateway.preprocessing import load_preprocessors
from stages.gateway.serve import serve_gateway
from stages.gateway.settings import (
    GatewayLimits,
    GatewaySettings,
    OverridePolicy,
    Recording,
    RunSampling,
    ToolFormat,
    ToolSchemas,
)
from stages.policy.tokenizer import load_tokenizer
from stages.ports import InferenceEngine, SwapMode
from stages.weights.receive import Receiver

log = structlog.get_logger("headrace.gateway")


async def run_gateway(context: WorkerContext) -> None:
    """Serve agents until the worker drains.

    Raises:
        ConfigError: one of the run's own functions can't be imported, or the engine can't be had.
    """
    config, metrics = context.config, context.metrics("gateway")
    preprocessors = load_preprocessors(config.gateway.preprocessors)
    incarnation = f"{os.getpid():x}-{secrets.token_hex(3)}"
    engines = (
        routed_engines(context, metrics) if has_servers(config.engine) else own_engine(context, metrics, incarnation)
    )
    async with (
        anyio.create_task_group() as tasks,
        engines as sampling,
        forwarding_client() as http,
    ):
        peers = LivePeers(context.broker, HttpForwarder(http))
        name = "-".join(part for part in ("gw", context.endpoints.node, incarnation) if part)
        online = _online(context, name, peers)
        gateway = Gateway(
            _settings(context, name),
            engine=sampling.source,
            tokenizer=load_tokenizer(policy_folder(config, context.folder)),
            recorder=LogRecorder(context.log),
            payloads=context.payloads,
            peers=peers,
            online=online,
            preprocessors=preprocessors,
        )
        tasks.start_soon(peers.listen)
        if online is not None:
            await tasks.start(online.run, gateway.close_session)
        tasks.start_soon(_report, gateway, online, sampling, metrics)

        serving = anyio.Event()

        def ready(url: str) -> None:
            metrics.labels.update({NAME_LABEL: gateway.settings.name, URL_LABEL: url})
            metrics.wait_for("calls")
            log.info("gateway ready", url=url)
            serving.set()

        tasks.start_soon(_serve, gateway, context, ready)
        await serving.wait()
        async with serve_sessions(context.broker, gateway, gateway.settings.name, sampling.source.health):
            await context.draining.wait()
        if online is not None:
            online.leave()
        tasks.cancel_scope.cancel()


def _online(context: WorkerContext, name: str, peers: LivePeers) -> OnlineService | None:
    streams = {
        stream: found for stream, found in run_streams(context.config).items() if found.runner is StreamRunner.ONLINE
    }
    if not streams:
        return None
    return OnlineService(
        context.log,
        context.payloads,
        gateway=name,
        streams=streams,
        attempts=context.config.rollout.attempts,
        idle_expiry_s=context.config.gateway.session_idle_s,
        peers=peers,
    )


def weights_cache(context: WorkerContext) -> str:
    """The folder that all engines of this node fetch weights into."""
    return context.config.engine.weights_cache or str(context.folder.cache / "weights")


async def _serve(gateway: Gateway, context: WorkerContext, ready: Callable[[str], None]) -> None:
    await serve_gateway(gateway, context.config.gateway.host, context.endpoints.gateway_port, ready)


def _settings(context: WorkerContext, name: str) -> GatewaySettings:
    config = context.config
    return GatewaySettings(
        name=name,
        context_length=config.rollout.max_context_tokens,
        sampling=RunSampling(
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            policy=OverridePolicy(config.gateway.asked_settings),
        ),
        recording=Recording(config.gateway.recording),
        tool_format=ToolFormat(config.gateway.tool_format),
        tool_schemas=ToolSchemas(config.gateway.tool_schemas),
        reasoning=config.gateway.reasoning,
        public_url=config.gateway.public_url,
        limits=GatewayLimits(idle_expiry_s=config.gateway.session_idle_s),
        generation_keys=tuple(key for key in (os.environ.get(GENERATION_KEY_ENV, ""),) if key),
        control_key=os.environ.get(CONTROL_KEY_ENV, ""),
    )


@asynccontextmanager
async def own_engine(context: WorkerContext, metrics: Metrics, incarnation: str) -> AsyncGenerator[Sampling]:
    """The engine in this process, at the current weights and kept there.

    Raises:
        ConfigError: see `open_engine`.
    """
    metrics.wait_for("the engine's model")
    async with open_engine(context) as engine, anyio.create_task_group() as tasks:
        gated, turn = GatedEngine(engine), anyio.Lock()
        receiver = Receiver(
            engine,
            context.payloads,
            cache_dir=weights_cache(context),
            mode=SwapMode(context.config.engine.swap),
            incarnation=incarnation,
            say=context.log.publish,
            metrics=metrics,
            on_state=gated.be,
            turn=turn,
            now=context.now,
        )
        metrics.wait_for("the current weights")
        sequence = await _catch_up(context, receiver)
        tasks.start_soon(_follow_weights, context, receiver, sequence)
        tasks.start_soon(receiver.run)
        giver = turn_giver(context, engine, incarnation, turn)
        if giver is not None:
            tasks.start_soon(giver.run)
        yield Sampling(source=gated, num_tokens=lambda: int(getattr(engine, "num_tokens", 0)))
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_engine(context: WorkerContext) -> AsyncGenerator[InferenceEngine]:
    """The configured engine, at version 0.

    Raises:
        ConfigError: the script can't be imported, or the engine needs a server.
    """
    config = context.config
    match config.engine.kind:
        case EngineKind.SCRIPTED:
            tokenizer = load_tokenizer(policy_folder(config, context.folder))
            yield ScriptedEngine(
                _script(config.engine.script),
                vocab_size=tokenizer.vocab_size,
                max_context=config.rollout.max_context_tokens,
                delay_s=config.engine.script_chunk_s,
                load_s=config.engine.script_load_s,
            )
        case EngineKind.BUILTIN:
            import torch  # noqa: PLC0415 - only this engine needs it

            from stages.engine.builtin import BuiltinEngineSettings, builtin_engine  # noqa: PLC0415

            torch.set_num_threads(config.engine.threads)
            settings = BuiltinEngineSettings(
                num_slots=config.engine.max_running_requests,
                max_context=config.rollout.max_context_tokens,
                seed=config.run.seed,
            )
            async with builtin_engine("builtin", policy_folder(config, context.folder), settings) as engine:
                yield engine
        case EngineKind.VLLM | EngineKind.SGLANG:
            raise ConfigError(f"engine.kind = {config.engine.kind.value}: its servers have workers of their own")


def _script(path: str) -> Script:
    return cast("Script", load_function("engine.script", path))  # cast: a user's function


async def _catch_up(context: WorkerContext, receiver: Receiver) -> int:
    """Load the newest version that stands before anything is served; the sequence it stands at."""
    sequence = 0
    async with context.log.read([WEIGHTS_PUBLISHED], follow=False) as entries:
        async for entry in entries:
            sequence = entry.sequence
            if isinstance(entry.message, WeightsPublished):
                receiver.offer(entry.message)
    newest = receiver.wanted
    if newest is not None and not await receiver.load(newest):
        log.warning("the newest weights can't be loaded; waiting for the next", version=newest.version)
    return sequence


async def _follow_weights(context: WorkerContext, receiver: Receiver, after: int) -> None:
    async with context.log.read([WEIGHTS_PUBLISHED], after_sequence=after) as entries:
        async for entry in entries:
            if isinstance(entry.message, WeightsPublished):
                receiver.offer(entry.message)


async def _report(gateway: Gateway, online: OnlineService | None, sampling: Sampling, metrics: Metrics) -> None:
    """Figures of the gateway and of what samples for it, for status."""
    last_tokens, last_time = 0, anyio.current_time()
    while True:
        await anyio.sleep(1.0)
        health = await sampling.source.health()
        metrics.received = gateway.counts.calls
        metrics.published = metrics.succeeded = gateway.num_recorded
        metrics.in_flight = health.num_running
        metrics.gauges.update(
            version=health.version,
            running=health.num_running,
            waiting=health.num_waiting,
            prefix_breaks=gateway.counts.prefix_breaks,
            context_overflows=gateway.counts.context_overflows,
            failed_calls=gateway.counts.failed_calls,
            sessions=len(gateway.sessions),
        )
        if online is not None:
            metrics.gauges.update(online.gauges())
        tokens = sampling.num_tokens()
        now = anyio.current_time()
        metrics.gauges["tokens_per_s"] = (tokens - last_tokens) / max(now - last_time, 1e-9)
        last_tokens, last_time = tokens, now
        waits_for = sampling.waits_for()
        if waits_for:
            metrics.wait_for(waits_for)
        elif health.num_running:
            metrics.work()
        else:
            metrics.wait_for((online.waits_for() if online is not None else "") or "calls")
