"""What samples for a gateway when the run has servers: the router over all engines that announce themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec

from ops.engines.clients import engine_client
from ops.engines.directory import EngineDirectory
from ops.workers.context import WorkerContext
from pipeline.metrics import Metrics
from stages.ports import TokenSource
from stages.routing.router import Router
from stages.routing.settings import RoutingSettings


def _nothing() -> str:
    return ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Where a gateway's tokens come from."""

    source: TokenSource
    num_tokens: Callable[[], int]
    """Sampled since the start."""
    waits_for: Callable[[], str] = _nothing
    """What calls wait for before they are sampled; empty: none waits."""


@asynccontextmanager
async def routed_engines(context: WorkerContext, metrics: Metrics) -> AsyncGenerator[Sampling]:
    """The router, once an engine takes requests or the worker drains."""
    config = context.config
    router = Router(RoutingSettings(wait_deadline_s=config.engine.wait_deadline_s))
    directory = EngineDirectory(
        context.broker, router, lambda kind, name, url: engine_client(config, context.folder, kind, name, url)
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(directory.run)
        metrics.wait_for("an engine that serves the current weights: see `headrace engine ps`")
        await _first(directory.heard, context.draining)
        yield Sampling(source=router, num_tokens=lambda: router.num_tokens, waits_for=router.waits_for)
        tasks.cancel_scope.cancel()


async def _first(*events: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:

        async def end_with(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(end_with, event)
