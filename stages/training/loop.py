"""The trainer's loop: manifests in the order of their steps, each step's effect exactly once in the surviving weights.

    checkpoint k ──▶ step.assembled k+1, k+2 … ──▶ rows ──▶ backend ──▶ weight folder ──▶ step.trained ──▶ checkpoint

The position lives in the checkpoint: what was trained after it is trained again from the same manifests. An incarnation
that lost its lease stops at its next look. What it still says after that, having slept between look and publish, is passed
over by whoever reads (`pipeline.generations`, `stages.training.lineage`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

import anyio
import anyio.to_thread
import msgspec
import structlog

from pipeline.errors import ContractError
from pipeline.log import RunLog
from pipeline.metrics import Metrics
from pipeline.turns import TurnTaker
from schemas.messages.rollout import RowTokens
from schemas.messages.sampling import RunFinished
from schemas.messages.training import Manifest, StepAssembled, StepTrained
from schemas.payload import PayloadRef
from schemas.topics import RUN_FINISHED, STEP_ASSEMBLED
from stages.ports import Payloads
from stages.training.metric_sinks import MetricSink
from stages.training.ports import RowArrays, StepResult, TrainerBackend
from stages.weight_files.folders import version_folder

log = structlog.get_logger("headrace.trainer")

_FETCHES_AT_ONCE: Final = 32


class Lease(Protocol):
    """The right to be the trainer."""

    @property
    def generation(self) -> int: ...

    async def check(self) -> None:
        """Return if the lease is held now.

        Raises:
            LeaseLostError: another incarnation holds it.
        """
        ...


class FollowerLease:
    """The lease of a rank that publishes nothing: rank 0 holds the real one, and its end ends all ranks."""

    generation = 0

    async def check(self) -> None:
        return


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the loop runs."""

    weights_dir: str
    steps: int | None
    """Last step; None = until the run is finished or drained."""
    start: int = 0
    """Ordinal of this start of the run: the end of an earlier one ends nothing."""
    checkpoint_every_steps: int
    mismatch_kl_warning: float = 0.0
    """Warn where a step's `mismatch/kl` is above this; 0 = never."""


class TrainerLoop:
    """One rank's loop."""

    def __init__(
        self,
        log_: RunLog,
        payloads: Payloads,
        backend: TrainerBackend,
        lease: Lease,
        metrics: Metrics,
        settings: LoopSettings,
        *,
        on_trained: Callable[[int], Awaitable[None]] | None = None,
        sinks: Sequence[MetricSink] = (),
        turns: TurnTaker | None = None,
    ) -> None:
        self._log: Final = log_
        self._payloads: Final = payloads
        self._backend: Final = backend
        self._lease: Final = lease
        self._metrics: Final = metrics
        self._settings: Final = settings
        self._on_trained = on_trained
        self._sinks: Final = sinks
        self._turns: Final = turns
        self._draining = False
        self._busy = False
        self._reading: Final = anyio.CancelScope()
        self._saved_step = 0
        self.step = 0
        """The last step whose effect is in the backend's weights."""

    def drain(self) -> None:
        """End after the step that is being computed, or at once while it waits for one."""
        self._draining = True
        if not self._busy:
            self._reading.cancel()

    async def run(self) -> None:
        """Train until the last step, or until drained; a checkpoint of the last step is written before the end.

        Raises:
            ContractError: steps are missing or out of order.
            LeaseLostError: another trainer took over.
        """
        backend = self._backend
        self._busy = True
        self.step = self._saved_step = await anyio.to_thread.run_sync(backend.resume, self._lease.generation)
        log.info("trainer starts", after_step=self.step, generation=self._lease.generation, rank=backend.rank)
        self._metrics.gauges["step"] = self.step
        if self._is_done():
            return
        with self._reading:
            await self._train_as_they_come()
        self._busy = True
        if self.step != self._saved_step:  # every rank decides alike: looking at the disk, they might not
            await self._checkpoint()

    async def _train_as_they_come(self) -> None:
        self._wait()
        async with self._log.read([STEP_ASSEMBLED, RUN_FINISHED]) as entries:
            async for entry in entries:
                message = entry.message
                if isinstance(message, RunFinished) and message.ordinal >= self._settings.start:
                    return
                if not isinstance(message, StepAssembled) or message.step <= self.step:
                    continue
                if message.step != self.step + 1:
                    raise ContractError(
                        f"expected step {self.step + 1} on the log after its checkpoint, found {message.step}"
                    )
                self._busy = True
                await self._train(message)
                if self._is_done():
                    return
                self._wait()

    def _is_done(self) -> bool:
        last = self._settings.steps
        return self._draining or (last is not None and self.step >= last)

    def _wait(self) -> None:
        self._busy = False
        self._metrics.wait_for(f"step.assembled.{self.step + 1}")

    async def _train(self, assembled: StepAssembled) -> None:
        backend, metrics = self._backend, self._metrics
        started = time.perf_counter()
        metrics.wait_for(f"rows of step {assembled.step}")
        manifest = msgspec.msgpack.decode(await self._payloads.get(assembled.manifest), type=Manifest)
        rows = await self._fetch(manifest)
        async with self._turn(assembled.step) as shared:
            metrics.work()
            fetched = time.perf_counter()
            metrics.in_flight = 1
            result = await anyio.to_thread.run_sync(backend.train, manifest, rows)
            metrics.in_flight = 0
            await self._lease.check()
            trained = time.perf_counter()
            folder = version_folder(self._settings.weights_dir, assembled.step, self._lease.generation)
            await anyio.to_thread.run_sync(backend.export_weights, folder)
        await self._lease.check()  # as late as can be; what slips through is passed over by every reader
        self.step = assembled.step
        seconds = time.perf_counter() - started
        stats = {**result.stats, **_performance(result, trained - fetched), **shared}
        if backend.rank == 0:
            self._warn_of_mismatch(stats)
            await self._say(assembled, result.digest, stats, result.skipped, seconds, result.num_tokens)
            await self._lease.check()
            for sink in self._sinks:
                await anyio.to_thread.run_sync(sink.write, self.step, stats)
        metrics.succeeded += 1
        metrics.gauges.update(
            step=self.step,
            step_s=seconds,
            fetch_s=fetched - started,
            tokens_per_s=result.num_tokens / seconds,
            reward=assembled.mean_reward,
            staleness=assembled.step - 1 - assembled.min_version,
        )
        if self.step % self._settings.checkpoint_every_steps == 0 or self._is_done():
            await self._checkpoint()
        if self._on_trained is not None:
            await self._lease.check()
            await self._on_trained(self.step)

    @asynccontextmanager
    async def _turn(self, step: int) -> AsyncGenerator[Mapping[str, float]]:
        """Compute inside the block: engines on the same machines rest meanwhile, where they share their time. Statistics."""
        if self._turns is None:
            yield {}
            return
        self._metrics.wait_for(f"engines to rest for step {step}")
        async with self._turns.take(step) as taken:
            yield {
                "time_share/wait_s": taken.waited_s,
                "time_share/engines_resting": float(len(taken.resting)),
                "time_share/engines_working": float(len(taken.working)),
            }

    def _warn_of_mismatch(self, stats: Mapping[str, float]) -> None:
        """Engine and trainer disagree about the same tokens at the same weights: training is off-policy without knowing it."""
        bound, found = self._settings.mismatch_kl_warning, stats.get("mismatch/kl", 0.0)
        self._metrics.gauges["mismatch_kl"] = found
        if bound and found > bound:
            log.warning(
                "the engine's log-probs differ from the trainer's at the same weights: compare dtypes, attention kernels and "
                "sampling settings, or correct for it (loss.behaviour_weight)",
                step=self.step,
                mismatch_kl=found,
                bound=bound,
                largest=stats.get("mismatch/max"),
            )

    async def _say(
        self,
        assembled: StepAssembled,
        digest: str,
        stats: dict[str, float],
        skipped: str,
        seconds: float,
        num_tokens: int,
    ) -> None:
        kept = self._backend.checkpoint_steps()
        trained = StepTrained(
            step=assembled.step,
            generation=self._lease.generation,
            digest=digest,
            manifest_id=assembled.manifest.id,
            stats=stats,
            skipped=skipped,
            seconds=round(seconds, 6),
            num_tokens=num_tokens,
            world_size=self._backend.world_size,
            checkpoint_step=max(kept, default=0),
            oldest_checkpoint_step=min(kept, default=0),
        )
        await self._log.publish(trained)
        self._metrics.published += 1

    async def _checkpoint(self) -> None:
        await self._lease.check()
        await anyio.to_thread.run_sync(self._backend.save_checkpoint, self.step, self._lease.generation)
        self._saved_step = self.step

    async def _fetch(self, manifest: Manifest) -> Mapping[int, RowArrays]:
        """The rows that this rank computes, all before the first collective."""
        rows: dict[int, RowArrays] = {}
        limiter = anyio.CapacityLimiter(_FETCHES_AT_ONCE)
        sizes = manifest.payload_sizes.as_numpy()

        async def fetch(index: int) -> None:
            ref = PayloadRef(store=manifest.payload_store, id=manifest.payload_ids[index], size_bytes=int(sizes[index]))
            async with limiter:
                rows[index] = row_arrays(await self._payloads.get(ref))

        async with anyio.create_task_group() as tasks:
            for index in self._backend.rows_needed(manifest):
                tasks.start_soon(fetch, index)
        return rows


def _performance(result: StepResult, seconds: float) -> dict[str, float]:
    """Of the computation alone, without fetching and export."""
    found = {"perf/train_s": seconds, "perf/tokens_per_s": result.num_tokens / seconds}
    if result.model_flops:
        found["perf/tflops_per_s"] = result.model_flops / seconds / 1e12
        if result.peak_flops:
            found["perf/mfu"] = result.model_flops / seconds / result.peak_flops
    return found


def row_arrays(data: memoryview) -> RowArrays:
    """The arrays of a RowTokens payload."""
    tokens = msgspec.msgpack.decode(data, type=RowTokens)
    token_ids = tokens.token_ids.as_numpy()
    arrays = RowArrays(
        token_ids=token_ids.view("int32"),
        loss_mask=tokens.loss_mask.as_numpy(),
        logprobs=tokens.logprobs.as_numpy().view("float32"),
        versions=tokens.versions.as_numpy(),
        turns=tokens.turns.as_numpy(),
    )
    lengths = {
        len(arrays.token_ids),
        len(arrays.loss_mask),
        len(arrays.logprobs),
        len(arrays.versions),
        len(arrays.turns),
    }
    if len(lengths) != 1:
        raise ContractError(
            f"a row's arrays differ in length: {sorted(lengths)}; its payload was not made by reward mapping"
        )
    return arrays
