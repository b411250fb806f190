"""The training step of every torch backend: manifest and rows in, one update a mini-batch, weights and checkpoints out.

    rows ─ micro-batches ─▶ guides (reference, teacher, critic) ─▶ advantages ─▶ critic's updates ─▶ policy's updates

How parameters lie over the ranks is the placement's business, what the model is made of the policy's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
import xxhash
from torch import Tensor

from schemas.messages.training import Manifest
from stages.learning.attention import pack_layout
from stages.learning.losses.batch import LossBatch
from stages.learning.losses.config import LossConfig
from stages.learning.rows import Rows
from stages.learning.update import OptimizerSettings, make_optimizer
from stages.training import checkpoints, lineage
from stages.training.batches import MicroBatch, micro_batch
from stages.training.checkpoint_writer import WRITE_TIMEOUT_S, CheckpointWriter
from stages.training.checkpoints import Position
from stages.training.errors import CheckpointError, TrainingError
from stages.training.guides import Guides
from stages.training.lora import ADAPTER_FOLDER
from stages.training.model_folder import digest, put_folder, write_folder
from stages.training.passes import Passes
from stages.training.placement import Placement
from stages.training.policies import Policy
from stages.training.ports import RowArrays, StepResult
from stages.training.ranks import Ranks
from stages.training.throughput import peak_flops, step_flops
from stages.training.updates import Learner, train_mini_batches

Plan = Callable[[Manifest, int], Sequence[Sequence[Sequence[Sequence[int]]]]]
"""Manifest and number of ranks → [rank][mini-batch][micro-batch] → row indices; pure, so every rank finds the same."""


class StepSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is the same for every backend."""

    model_folder: str
    """HF folder of version 0."""
    checkpoint_dir: str
    keep_checkpoints: int = 2
    keep_every_steps: int = 0
    """Checkpoints of every so many steps are kept for good (an archive: the log need not reach back to them); 0 = none."""
    async_checkpoints: bool = True
    """Go on training while a checkpoint is written."""
    checkpoint_timeout_s: float = WRITE_TIMEOUT_S
    """How long a rank that has written its part waits for the others."""
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossConfig = LossConfig()
    export_dtype: str = ""
    """Of exported weights, e.g. bfloat16; empty: as they are trained."""
    adapter_only: bool = False
    """Export the adapter alone: engines put it on version 0. Needs a policy with one."""
    peak_tflops: float = 0.0
    """Peak of one device; 0: known by its name, or not at all."""


class StepBackend:
    """One rank."""

    def __init__(
        self,
        settings: StepSettings,
        plan: Plan,
        ranks: Ranks,
        policy: Policy,
        placement: Placement,
        guides: Guides,
        passes: Passes,
        *,
        data_ranks: Ranks | None = None,
    ) -> None:
        """Take over a policy.

        Args:
            settings: the step's.
            plan: rows to ranks.
            ranks: all ranks: they write a checkpoint together.
            policy: what is trained.
            placement: how it lies over the ranks.
            guides: what else gives values for tokens.
            passes: how micro-batches go through the policy.
            data_ranks: those among which rows are dealt, where several ranks share a model; None: all.
        """
        self._settings: Final = settings
        self._plan: Final = plan
        self._ranks: Final = ranks
        self._data_ranks: Final = data_ranks or ranks
        self._policy: Final = policy
        self._placement: Final = placement
        self._guides: Final = guides
        parameters = [p for p in policy.network.parameters() if p.requires_grad]
        limit = partial(placement.clip, parameters)
        self._learner: Final = Learner(
            passes=passes,
            optimizer=make_optimizer(policy.network.parameters(), settings.optimizer),
            parameters=parameters,
            ranks=self._data_ranks,
            loss=settings.loss,
            optimizer_settings=settings.optimizer,
            sum_gradients=partial(placement.sum_gradients, parameters),
            clip=limit,
        )
        self._writer: Final = CheckpointWriter(
            Path(settings.checkpoint_dir),
            ranks,
            in_background=settings.async_checkpoints,
            keep=settings.keep_checkpoints,
            keep_every_steps=settings.keep_every_steps,
            timeout_s=settings.checkpoint_timeout_s,
        )
        self._peak_flops: Final = peak_flops(ranks.device, settings.peak_tflops) or 0.0
        self._shapes: Final = policy.shapes()
        self._step = 0
        self._resumed_step = 0
        self._num_updates = 0
        self._num_critic_updates = 0
        self._exported: tuple[int, dict[str, Tensor]] | None = None

    @property
    def rank(self) -> int:
        """Among all ranks of the trainer."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """All ranks of the trainer."""
        return self._ranks.world_size

    def resume(self, generation: int = 0) -> int:
        """Load the newest whole checkpoint of the surviving line; the step it stands after, 0 for none. Rank 0's generation, if
        it has one, supersedes from here on what earlier ones have beyond.

        Raises:
            CheckpointError: The newest whole one belongs to other settings or another model.
        """
        position = self._agreed_position()
        if generation and self.rank == 0:
            lineage.fork(Path(self._settings.checkpoint_dir), generation, 0 if position is None else position[0])
        if position is None:
            return 0
        root = Path(self._settings.checkpoint_dir)
        folder = root / checkpoints.folder_name(*position)
        state = self._state()
        with self._ranks.collective(f"the load of {folder.name}"):
            checkpoints.read(folder, state, self._ranks)
        self._set_state(state)
        record = checkpoints.read_record(folder)
        self._step = self._resumed_step = record.step
        self._num_updates = record.num_updates
        self._exported = None
        return self._step

    def _agreed_position(self) -> tuple[int, int] | None:
        """Step and generation of the checkpoint to load, as rank 0 finds it: while another incarnation ends, ranks might see
        different folders.
        """
        error: CheckpointError | None = None
        step, generation = 0, 0
        if self.rank == 0:
            try:
                found = lineage.newest_whole(Path(self._settings.checkpoint_dir), self._settings_hash())
                if found is not None:
                    step, generation = found.record.step, found.record.generation
            except CheckpointError as fault:
                error, step = fault, -1
        step, generation = self._ranks.agreed(step), self._ranks.agreed(generation)
        if step < 0:
            raise error or CheckpointError("rank 0 found no checkpoint that can be used; its log says why")
        return (step, generation) if step else None

    def rows_needed(self, manifest: Manifest) -> Sequence[int]:
        """The rows that this rank's plan names."""
        return sorted({index for mini in self._my_plan(manifest) for micro in mini for index in micro})

    def train(self, manifest: Manifest, rows: Mapping[int, RowArrays]) -> StepResult:
        """One step.

        Raises:
            TrainingError: The step doesn't follow the last one, or a row doesn't fit the manifest.
            CollectiveError: another rank left the step.
        """
        if manifest.step != self._step + 1:
            raise TrainingError(
                f"the weights stand after step {self._step}: expected step {self._step + 1} next, found {manifest.step}"
            )
        plan = self._my_plan(manifest)
        batches = [[self._micro_batch(manifest, rows, micro) for micro in mini] for mini in plan]
        with self._ranks.collective(f"step {manifest.step}"):
            guided = self._guides.prepare(manifest, rows, plan, batches)
            skipped = self._guides.train_critic(guided, num_updates_before=self._num_critic_updates)
            self._num_critic_updates += guided.num_critic_updates
            stats: dict[str, float] = {}
            if not self._guides.only_critic(manifest.step):
                stats, left_out, made = train_mini_batches(
                    self._learner,
                    guided.batches,
                    temperature=manifest.temperature,
                    num_updates_before=self._num_updates,
                )
                skipped += left_out
                self._num_updates += made
            stats |= guided.means(self._data_ranks)
            self._step = manifest.step
            found = self.digest()
        return StepResult(
            digest=found,
            stats=stats,
            skipped="; ".join(skipped),
            num_tokens=int(manifest.num_tokens.as_numpy().sum()),
            model_flops=self._flops(manifest),
            peak_flops=self._peak_flops * self._ranks.world_size,
        )

    def digest(self) -> str:
        """64-bit xxh3 over all exported tensors' bytes in order of name; on ranks that don't write, of what they have."""
        return digest(self._whole_tensors())

    def save_checkpoint(self, step: int, generation: int) -> None:
        """Weights, optimizer, critic, RNG and position; written in the background where that is set."""
        position = Position(
            step=step,
            generation=self._ranks.agreed(generation),  # the lease is rank 0's: the others don't know its generation
            num_updates=self._num_updates,
            settings_hash=self._settings_hash(),
            resumed_step=self._resumed_step,
        )
        self._writer.save(self._state(), position)

    def checkpoint_steps(self) -> Sequence[int]:
        """Steps whose checkpoints are kept and whole, ascending; without the archive."""
        return lineage.resumable_steps(Path(self._settings.checkpoint_dir), keep=self._settings.keep_checkpoints)

    def export_weights(self, folder: str) -> None:
        """An ordinary HF folder, visible only when complete; adapters in a folder inside it. Or the adapter's folder alone."""
        extras = Path(f"{folder}.extras")
        with self._ranks.collective("the export of weights"):
            self._policy.write_extras(extras)
        if self._settings.adapter_only:
            if self.rank == 0:
                put_folder(extras / ADAPTER_FOLDER, folder)
        else:
            tensors = self._whole_tensors()
            if self.rank == 0:
                write_folder(tensors, self._settings.model_folder, folder, extras=extras if extras.is_dir() else None)
        if self.rank == 0:
            shutil.rmtree(extras, ignore_errors=True)
        self._ranks.barrier()

    def close(self) -> None:
        """Finish the checkpoint that is being written."""
        self._writer.close()

    def _flops(self, manifest: Manifest) -> float:
        return step_flops(
            self._shapes,
            manifest.num_tokens.as_numpy(),
            manifest.num_loss_tokens.as_numpy(),
            attention_width=self._policy.attention_width,
            num_layers=self._policy.num_layers,
        )

    def _micro_batch(self, manifest: Manifest, rows: Mapping[int, RowArrays], indices: Sequence[int]) -> MicroBatch:
        device = self._ranks.device
        if indices or not self._placement.every_micro_batch:
            return micro_batch(manifest, rows, indices, device)
        return blank_micro_batch(manifest.step, device)

    def _my_plan(self, manifest: Manifest) -> Sequence[Sequence[Sequence[int]]]:
        return self._plan(manifest, self._data_ranks.world_size)[self._data_ranks.rank]

    def _whole_tensors(self) -> dict[str, Tensor]:
        """Gathered once a step; collective."""
        if self._exported is None or self._exported[0] != self._step:
            tensors = self._policy.tensors()
            if self._settings.export_dtype:
                dtype: torch.dtype = getattr(torch, self._settings.export_dtype)
                tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            self._exported = (self._step, tensors)
        return self._exported[1]

    def _settings_hash(self) -> str:
        """What the saved state depends on: its form and shapes, and what of the optimizer's settings comes back with it. The
        schedule, the clipping and the losses may change between two starts.
        """
        parts: list[object] = [self._policy.saved_shapes(), *_kept_with(self._settings.optimizer)]
        if self._policy.layout != "hf":
            parts.append(self._policy.layout)
        if (critic := self._guides.critic) is not None:
            parts += [critic.shapes(), *_kept_with(critic.settings.optimizer)]
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(parts, order="sorted"))

    def _state(self) -> dict[str, object]:
        state: dict[str, object] = {
            "model": self._policy.saved(),
            "optimizer": self._policy.optimizer_state(self._learner.optimizer),
            "rng": torch.get_rng_state(),
        }
        if (critic := self._guides.critic) is not None:
            state |= critic.state()
            state["critic_updates"] = torch.tensor(self._num_critic_updates)
        if self._ranks.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self._ranks.device)
        return state

    def _set_state(self, state: dict[str, object]) -> None:
        self._policy.load(_part(state, "model"))
        self._policy.set_optimizer_state(self._learner.optimizer, _part(state, "optimizer"))
        if (critic := self._guides.critic) is not None:
            critic.set_state(state)
            self._num_critic_updates = int(cast("Tensor", state["critic_updates"]))
        torch.set_rng_state(cast("Tensor", state["rng"]))
        if self._ranks.device.type == "cuda":
            torch.cuda.set_rng_state(cast("Tensor", state["cuda_rng"]), self._ranks.device)


def _kept_with(optimizer: OptimizerSettings) -> list[object]:
    return ["adamw", optimizer.betas, optimizer.eps, optimizer.weight_decay]


def _part(state: dict[str, object], name: str) -> dict[str, Any]:  # torch's own types for it are no more precise
    return cast("dict[str, Any]", state[name])


def blank_micro_batch(step: int, device: torch.device) -> MicroBatch:
    """One token of weight 0, for a rank whose rows ran out while the others still meet in collectives."""
    layout = pack_layout([1], device)
    zero_T = torch.zeros(1, device=device)
    return MicroBatch(
        tokens_T=torch.zeros(1, dtype=torch.int64, device=device),
        layout=layout,
        target_N=torch.zeros(0, dtype=torch.int64, device=device),
        weight_T=zero_T,
        loss=LossBatch(
            rows=Rows.from_cu_seqlens(layout.cu_seqlens),
            loss_mask_T=torch.zeros(1, dtype=torch.bool, device=device),
            advantages_T=zero_T,
            old_logp_T=zero_T,
            versions_T=torch.full((1,), -1, device=device),
            current_version=step,
        ),
    )
