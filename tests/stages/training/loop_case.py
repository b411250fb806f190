"""A trainer process over a real log, for tests that kill it and put it to sleep: the loop, its lease, a tiny model."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import msgspec
import numpy as np
from backend_case import Case, Recording, settings_of
from training_case import plan, step_of

from broker.api import Broker
from broker.connect import connect
from broker.settings import ConnectSettings
from pipeline.lease import HeldLease
from pipeline.log import RunLog, RunPayloads
from pipeline.metrics import Metrics
from schemas import arrays
from schemas.messages.rollout import RowTokens
from schemas.messages.training import StepAssembled
from stages.training.backends import hf_backend
from stages.training.determinism import set_determinism
from stages.training.loop import LoopSettings, TrainerLoop
from stages.training.placement import WholePlacement
from stages.training.ranks import single_rank
from stages.training.step_backend import StepBackend

RUN = "t"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer finds everything."""

    url: str
    token_file: str
    case: Case
    checkpoint_every: int = 1
    lease_s: float = 30.0
    sleep_before: tuple[str, int] = ("", 0)
    """("publish" or "checkpoint", step): the process stops itself after its last look at the lease before that."""


async def publish_steps(broker: Broker, case: Case) -> None:
    """The run's manifests and rows on its log."""
    log, payloads = RunLog(broker), RunPayloads(broker)
    for number in range(case.first_step, case.last_step + 1):
        manifest, rows = step_of(number, num_rows=case.num_rows, mini_batches=case.mini_batches)
        refs = [
            await payloads.put(
                msgspec.msgpack.encode(
                    RowTokens(
                        token_ids=arrays.int32(row.token_ids),
                        loss_mask=arrays.bits(row.loss_mask),
                        logprobs=arrays.float32(row.logprobs),
                        versions=arrays.runs(row.versions),
                        turns=arrays.runs(row.turns),
                    )
                )
            )
            for row in rows.values()
        ]
        manifest = msgspec.structs.replace(
            manifest,
            run=RUN,
            payload_ids=[ref.id for ref in refs],
            payload_sizes=arrays.int64([ref.size_bytes for ref in refs]),
            payload_store=refs[0].store,
        )
        tokens = manifest.num_tokens.as_numpy()
        await log.publish(
            StepAssembled(
                step=number,
                manifest=await payloads.hold(msgspec.msgpack.encode(manifest)),
                groups=manifest.groups,
                num_rows=len(refs),
                num_tokens=int(np.sum(tokens)),
                num_mini_batches=case.mini_batches,
                min_version=0,
                mean_reward=0.0,
            )
        )


def trainer_process(pipe: Connection, place: Place) -> None:
    """Train to the end; says its generation when it starts, then how it ended."""
    set_determinism(seed=0, threads=1)
    try:
        anyio.run(_train, pipe, place)
    except BaseException as error:  # noqa: BLE001 - told to the test, whatever it is
        leaves = [error]
        while isinstance(leaves[0], BaseExceptionGroup):
            leaves = [*leaves[0].exceptions, *leaves[1:]]
        pipe.send(f"{type(leaves[0]).__name__}: {leaves[0]}")
    else:
        pipe.send("done")


def _sleep_before(loop: TrainerLoop, backend: StepBackend, what: str, step: int) -> None:
    """Between the look at the lease and what it was for, the process is put to sleep from outside."""
    if what == "publish":
        publish = loop._log.publish

        async def late(message: msgspec.Struct) -> msgspec.Struct:
            if message.step == step:
                os.kill(os.getpid(), signal.SIGSTOP)
            return await publish(message)

        loop._log.publish = late
        return
    save = backend.save_checkpoint

    def late_save(number: int, generation: int) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGSTOP)
        save(number, generation)

    backend.save_checkpoint = late_save


async def _train(pipe: Connection, place: Place) -> None:
    ranks = single_rank()
    placement = Recording(WholePlacement(ranks))
    backend = hf_backend(settings_of(place.case), place.case.models, plan(place.case.budget), ranks, placement)
    settings = ConnectSettings(token_file=place.token_file)
    async with connect(place.url, RUN, settings) as broker:
        lease = HeldLease(broker, "trainer.lease", f"pid{os.getpid()}", place.lease_s)
        await lease.acquire()
        loop = TrainerLoop(
            RunLog(broker),
            RunPayloads(broker),
            backend,
            lease,
            Metrics(RUN, "trainer"),
            LoopSettings(
                weights_dir=str(Path(place.case.folder) / "weights"),
                steps=place.case.last_step,
                checkpoint_every_steps=place.checkpoint_every,
            ),
        )
        if place.sleep_before[0]:
            _sleep_before(loop, backend, *place.sleep_before)
        pipe.send(lease.generation)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease.keep)
            await loop.run()
            tasks.cancel_scope.cancel()
    backend.close()
