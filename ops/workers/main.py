"""`headrace worker STAGE …`: connect, run the services, drain on SIGTERM, end with the parent."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from ops.arena.lifeline import die_with_parent
from ops.connection import connect_to
from ops.engines.life import EngineGivenUpError
from ops.engines.plan import EngineChoice, chosen_engine
from ops.metrics.serving import serve_metrics
from ops.nodes.ranks import RanksGivenUpError
from ops.run_folder import RunFolder
from ops.stopping import until_stopped
from ops.supervise.process import EXIT_GIVEN_UP, PROGRESS_ENV
from ops.tracing import tracing_of
from ops.wiring import run_service
from ops.workers.context import WorkerContext
from ops.workers.last_resort import end_in_any_case
from ops.workers.slots import claim_slot
from pipeline.logs import set_up_logs
from pipeline.metrics import WorkerReport
from pipeline.presence import PresenceLease
from schemas.errors import ConfigError
from stages.training.errors import OtherSettingsError

log = structlog.get_logger("headrace.worker")

_PROGRESS_PERIOD_S: Final = 0.5
PERMANENT: Final = (ConfigError, EngineGivenUpError, RanksGivenUpError, OtherSettingsError)
"""What no other start of the same process can mend."""

PARENT_ENV = "HEADRACE_PARENT_PID"
EXIT_DRAINED = 128 + signal.SIGTERM
"""A trainer that was told to end before its work was done: whoever watches it starts it again."""


async def run_worker(
    stages: Sequence[str], folder: RunFolder, engine: EngineChoice | None = None, port: int = 0
) -> bool:
    """Run these services until drained (by a first signal), or until one of them fails. Whether they ended by themselves."""
    if list(stages) == ["prepare"]:
        from ops.workers.prepare import prepare  # noqa: PLC0415 - only this process needs tokenizers and policies

        await anyio.to_thread.run_sync(prepare, folder)
        return True
    config, endpoints = folder.read_config(), folder.read_endpoints()
    # What is stored again before half the age at which it may be collected is young enough until a message names it.
    login = msgspec.structs.replace(
        endpoints.broker_login, payload_renew_after_s=config.retention.min_payload_age_s / 2
    )
    endpoints = msgspec.structs.replace(endpoints, broker_login=login, gateway_port=port or endpoints.gateway_port)
    plan = chosen_engine(engine, config.engine) if "engine" in stages else None
    names = "+".join(stages)
    with tracing_of(config.run.id, names, os.environ) as tracing:
        async with connect_to(endpoints, name=names) as broker:
            context = WorkerContext(folder, config, endpoints, broker, engine=plan, tracing=tracing)
            context.on_stop = end_in_any_case
            return await _serve(context, stages)


async def _serve(context: WorkerContext, stages: Sequence[str]) -> bool:
    """Run the services of a context until drained, or until one of them fails. Whether they ended by themselves."""
    config = context.config
    async with (
        until_stopped(partial(_drain, context)),
        anyio.create_task_group() as background,
        _present(context, stages) as presence,
    ):
        background.start_soon(presence.keep)
        background.start_soon(context.announce_reports)
        background.start_soon(context.broker.follow_shares)
        if place := os.environ.get(PROGRESS_ENV):
            background.start_soon(say_progress, context.reports, Path(place))
        if config.metrics.port:
            background.start_soon(serve_metrics, config.metrics, stages[0], context.reports)
        async with anyio.create_task_group() as services:
            for stage in stages:
                services.start_soon(run_service, stage, context)
        await presence.leave()
        background.cancel_scope.cancel()
    return not context.draining.is_set()


@asynccontextmanager
async def _present(context: WorkerContext, stages: Sequence[str]) -> AsyncGenerator[PresenceLease]:
    """A lease in a slot that no other living process of this machine has, and that a successor takes up."""
    name = f"presence.{'+'.join(stages)}"
    with claim_slot(context.folder.path / "workers", name, host=context.endpoints.node or None) as slot:
        name = slot.name.removeprefix("presence.")
        yield PresenceLease(context.broker, name, stages, now=context.now, node=context.endpoints.node)


async def say_progress(reports: Callable[[], Sequence[WorkerReport]], place: Path) -> None:
    """Touch a file whenever more messages of this process stand on the log, for ever: a process that only dies leaves no such sign."""
    told = 0
    while True:
        published = sum(report.published for report in reports())
        if published != told:
            told = published
            try:
                place.write_text(f"{published}\n")  # noqa: ASYNC240 - a few bytes
            except OSError as error:
                log.warning("progress could not be noted", reason=str(error))
        await anyio.sleep(_PROGRESS_PERIOD_S)


def _drain(context: WorkerContext) -> None:
    log.info("draining")
    context.drain()


def tie_to_parent() -> None:
    """Die with the supervisor that started this process, if one did."""
    parent = os.environ.get(PARENT_ENV, "")
    if parent.isdecimal():
        # Under torchrun the rank's parent is torchrun, which dies with the supervisor by a leash of its own.
        die_with_parent(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else int(parent))


def worker_main(
    stages: Sequence[str],
    run_dir: str,
    *,
    log_level: str = "INFO",
    engine: EngineChoice | None = None,
    port: int = 0,
) -> int:
    """The whole life of a worker process; its exit code."""
    tie_to_parent()
    set_up_logs(process="+".join(stages), level=log_level)
    try:
        done = anyio.run(run_worker, stages, RunFolder(run_dir), engine, port, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        errors = _leaves(group)
        for error in errors:
            log.exception("worker failed", error=f"{type(error).__name__}: {error}", exc_info=error)
        return exit_code(errors)
    except Exception as error:
        log.exception("worker failed", error=f"{type(error).__name__}: {error}")
        return exit_code([error])
    return EXIT_DRAINED if {"trainer", "ranks"} & set(stages) and not done else 0


def exit_code(errors: Sequence[BaseException]) -> int:
    """How a process ends that failed: whether it is worth starting it again."""
    return EXIT_GIVEN_UP if any(isinstance(error, PERMANENT) for error in errors) else 1


def _leaves(group: BaseExceptionGroup) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves
