"""The trainer's process: one rank of the training loop."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager

import anyio
import structlog

from ops.config import RunConfig
from ops.policy_folder import policy_folder
from ops.redaction import redacted
from ops.run_folder import RunFolder
from ops.workers.checkpoint_place import checkpoint_folder
from ops.workers.context import WorkerContext
from ops.workers.turns import turn_settings
from pipeline.lease import HeldLease
from pipeline.metrics import worker_name
from pipeline.turns import TurnTaker
from schemas.errors import ConfigError
from schemas.topics import RUN_STARTED
from stages.training.errors import CheckpointError, CollectiveError, TrainingError
from stages.training.loop import FollowerLease, LoopSettings, TrainerLoop
from stages.training.metric_sinks import MetricSink
from stages.training.ports import TrainerBackend
from stages.training.standin import StandInBackend
from stages.training.trackers import open_tracker
from stages.weight_files.holds import prune

log = structlog.get_logger("headrace.trainer")

LEASE_KEY = "trainer.lease"


async def run_trainer(context: WorkerContext) -> None:
    """Train until the run's last step, or until drained."""
    config = context.config
    metrics = context.metrics("trainer")
    metrics.wait_for("the training backend")
    rank = int(os.environ.get("RANK", "0"))
    lease = None
    if rank == 0:
        lease = HeldLease(context.broker, LEASE_KEY, worker_name(), config.training.lease_s, now=context.now)
    backends = open_backend(config, context.folder)
    with settings_errors():
        backend = await anyio.to_thread.run_sync(backends.__enter__)
        sinks = open_sinks(config, context.folder) if rank == 0 else ()
    try:
        if lease is not None:
            await lease.acquire()
        turns = _turns(context, lease)
        loop = TrainerLoop(
            context.log,
            context.payloads,
            backend,
            FollowerLease() if lease is None else lease,
            metrics,
            LoopSettings(
                weights_dir=str(context.folder.weights),
                steps=config.run.steps,
                start=await _latest_start(context),
                checkpoint_every_steps=config.training.checkpoint_every_steps,
                mismatch_kl_warning=config.training.mismatch_kl_warning,
            ),
            on_trained=None if lease is None else _pruner(context, lease),
            sinks=sinks,
            turns=turns,
        )
        context.on_drain(loop.drain)
        async with anyio.create_task_group() as tasks:
            if turns is not None:
                await tasks.start(turns.run)
            if lease is not None:
                tasks.start_soon(lease.keep)
            await loop.run()
            tasks.cancel_scope.cancel()
    finally:
        for sink in sinks:
            sink.close()
        await anyio.to_thread.run_sync(backends.__exit__, None, None, None)


def _turns(context: WorkerContext, lease: HeldLease | None) -> TurnTaker | None:
    if not context.config.engine.time_shared:
        return None
    turns = TurnTaker(context.broker, turn_settings(context.config), calls=lease is not None)
    turns.generation = 0 if lease is None else lease.generation
    return turns


async def _latest_start(context: WorkerContext) -> int:
    ordinal = 0
    while await context.log.find(RUN_STARTED, ordinal + 1) is not None:
        ordinal += 1
    return ordinal


def _pruner(context: WorkerContext, lease: HeldLease) -> Callable[[int], Awaitable[None]]:
    training, weights_dir = context.config.training, str(context.folder.weights)

    async def after(step: int) -> None:
        first = step - training.keep_weight_versions + 1
        await anyio.to_thread.run_sync(
            lambda: prune(
                weights_dir,
                keep_from_version=first,
                up_to_generation=lease.generation,
                hold_s=training.hold_weights_s,
            )
        )

    return after


@contextmanager
def settings_errors() -> Generator[None]:
    """What a trainer can't begin with is an error of the settings: starting it again changes nothing.

    Raises:
        ConfigError: for a TrainingError that is neither of the other ranks nor of a checkpoint's files.
    """
    try:
        yield
    except (CollectiveError, CheckpointError):
        raise
    except TrainingError as error:
        raise ConfigError(str(error)) from error


def open_sinks(config: RunConfig, folder: RunFolder) -> Sequence[MetricSink]:
    """Where statistics go beside the log.

    Raises:
        TrainingError: a tracker that is not known or not installed.
    """
    told = redacted(config)
    return [open_tracker(name, folder.path, config.run.id, told) for name in config.training.trackers]


@contextmanager
def open_backend(config: RunConfig, folder: RunFolder) -> Generator[TrainerBackend]:
    """The backend that the config names; torch is imported only where it is used."""
    training, checkpoints = config.training, str(checkpoint_folder(config, folder))
    if training.backend == "standin":
        yield StandInBackend(checkpoints, keep=training.keep_checkpoints, step_s=training.standin_step_s)
        return
    from ops.workers.torch_trainer import open_torch_backend  # noqa: PLC0415 - the base install has no torch

    with open_torch_backend(config, policy_folder(config, folder), checkpoints) as backend:
        yield backend
