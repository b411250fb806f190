"""Fold a recording's inputs again, on any broker, with the code of a worker."""

from __future__ import annotations

from pathlib import Path

import anyio

from broker.api import Broker
from broker.recording import Recording
from ops.logtools.recorded import recorded_config
from ops.logtools.replay import Replay, ReplaySettings
from ops.run_folder import Endpoints, RunFolder
from ops.wiring import run_service
from ops.workers.context import WorkerContext
from pipeline.log import RunLog
from schemas.messages.training import StepAssembled
from schemas.topics import STEP_ASSEMBLED

INPUTS = ("group.issued", "trajectory.ready", "run.started", "fold.tick")


def recorded_steps(recording: Recording) -> tuple[list[StepAssembled], list[bytes]]:
    """The steps that were assembled, and their manifests."""
    steps = [STEP_ASSEMBLED.decode(r.data) for r in recording.records([STEP_ASSEMBLED.filter(recording.run)])]
    return steps, [bytes(recording.payload(step.manifest)) for step in steps]


async def fold_again(recording: Recording, broker: Broker, folder: Path) -> tuple[list[StepAssembled], list[bytes]]:
    """Replay what assembly read at full speed, assemble, and give steps and manifests."""
    num_steps = len(recorded_steps(recording)[0])
    filters = tuple(f"hr.{recording.run}.{topic}.>" for topic in INPUTS)
    await Replay(recording, broker, ReplaySettings(filters=filters)).run()
    context = WorkerContext(RunFolder(folder), recorded_config(recording), Endpoints(run=recording.run), broker)
    folded: list[StepAssembled] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_service, "assembly", context)
        with anyio.fail_after(60):
            async with RunLog(broker).read([STEP_ASSEMBLED]) as entries:
                async for entry in entries:
                    assert isinstance(entry.message, StepAssembled)
                    folded.append(entry.message)
                    if len(folded) == num_steps:
                        break
        context.drain()
    return folded, [bytes(await broker.payloads.get(step.manifest)) for step in folded]
