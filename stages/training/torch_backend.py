"""The plain torch backend: the whole model on every rank, gradients summed over gloo or NCCL.

On CPU with one thread count a step is bitwise repeatable, and so is a resumed run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from schemas.messages.training import Manifest
from stages.learning.forward import PolicyForward
from stages.learning.losses.config import LossConfig
from stages.learning.update import OptimizerSettings, make_optimizer, sum_gradients
from stages.training import checkpoints
from stages.training.batches import micro_batch
from stages.training.errors import TrainingError
from stages.training.model_folder import digest, hf_tensors, read_model, write_folder
from stages.training.ports import RowArrays, StepResult
from stages.training.ranks import Ranks
from stages.training.updates import Learner, train_mini_batches

Plan = Callable[[Manifest, int], Sequence[Sequence[Sequence[Sequence[int]]]]]
"""Manifest and number of ranks → [rank][mini-batch][micro-batch] → row indices; pure, so every rank finds the same."""


class TorchBackendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plain torch backend is made of."""

    model_folder: str
    """HF folder of version 0."""
    checkpoint_dir: str
    keep_checkpoints: int = 2
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossConfig = LossConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""


def set_determinism(*, seed: int, threads: int) -> None:
    """Make this process's torch repeatable; call it before anything of torch runs. Bitwise on CPU for a given `threads`."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


class TorchBackend:
    """One data-parallel rank."""

    def __init__(self, settings: TorchBackendSettings, plan: Plan, ranks: Ranks) -> None:
        self._settings = settings
        self._plan = plan
        self._ranks = ranks
        self._model = read_model(settings.model_folder, getattr(torch, settings.dtype), ranks.device)
        if settings.activation_checkpointing:
            self._model.gradient_checkpointing_enable()  # pyright: ignore[reportCallIssue] - transformers' models have it
        policy = PolicyForward(self._model)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        self._learner = Learner(
            policy=policy,
            optimizer=make_optimizer(policy.parameters(), settings.optimizer),
            parameters=parameters,
            ranks=ranks,
            loss=settings.loss,
            optimizer_settings=settings.optimizer,
            sum_gradients=partial(sum_gradients, parameters, ranks.sum) if ranks.world_size > 1 else _nothing,
        )
        self._step = 0
        self._num_updates = 0

    @property
    def rank(self) -> int:
        """Among the data-parallel ranks."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self._ranks.world_size

    def resume(self) -> int:
        """Load the newest whole checkpoint; the step it stands after, 0 for none.

        Raises:
            CheckpointError: The newest whole one belongs to other settings or another model.
        """
        found = checkpoints.newest_whole(self._root, self._settings_hash())
        if found is None:
            return 0
        record, folder = found
        state = self._state()
        checkpoints.read(folder, state, self._ranks)
        self._set_state(state)
        self._step, self._num_updates = record.step, record.num_updates
        return record.step

    def rows_needed(self, manifest: Manifest) -> Sequence[int]:
        """The rows that this rank's plan names."""
        return sorted({index for mini in self._my_plan(manifest) for micro in mini for index in micro})

    def train(self, manifest: Manifest, rows: Mapping[int, RowArrays]) -> StepResult:
        """One step.

        Raises:
            TrainingError: The step doesn't follow the last one, or a row doesn't fit the manifest.
        """
        if manifest.step != self._step + 1:
            raise TrainingError(
                f"the weights stand after step {self._step}: expected step {self._step + 1} next, found {manifest.step}"
            )
        device = self._ranks.device
        plan = [[micro_batch(manifest, rows, micro, device) for micro in mini] for mini in self._my_plan(manifest)]
        stats, skipped, made = train_mini_batches(
            self._learner, plan, temperature=manifest.temperature, num_updates_before=self._num_updates
        )
        self._step = manifest.step
        self._num_updates += made
        return StepResult(
            digest=self.digest(),
            stats=stats,
            skipped="; ".join(skipped),
            num_tokens=int(manifest.num_tokens.as_numpy().sum()),
        )

    def digest(self) -> str:
        """64-bit xxh3 over all tensors' bytes in order of name: equal digests, equal weights."""
        return digest(hf_tensors(self._model))

    def save_checkpoint(self, step: int, generation: int) -> None:
        """Weights, optimizer, RNG and position, atomically; then prune."""
        checkpoints.write(
            self._root,
            self._state(),
            self._ranks,
            step=step,
            generation=self._ranks.agreed(generation),  # the lease is rank 0's: the others don't know its generation
            num_updates=self._num_updates,
            settings_hash=self._settings_hash(),
        )
        if self.rank == 0:
            checkpoints.prune(self._root, keep=self._settings.keep_checkpoints)

    def checkpoint_steps(self) -> Sequence[int]:
        """Steps whose checkpoints are kept, ascending."""
        return sorted({step for step, _, _ in checkpoints.folders(self._root)})

    def export_weights(self, folder: str) -> None:
        """An ordinary HF folder, visible only when complete."""
        if self.rank == 0:
            write_folder(hf_tensors(self._model), self._settings.model_folder, folder)
        self._ranks.barrier()

    def close(self) -> None:
        """Nothing is held open."""

    @property
    def _root(self) -> Path:
        return Path(self._settings.checkpoint_dir)

    def _my_plan(self, manifest: Manifest) -> Sequence[Sequence[Sequence[int]]]:
        return self._plan(manifest, self.world_size)[self.rank]

    def _settings_hash(self) -> str:
        """What the saved state depends on: shapes of the weights and the optimizer's kind."""
        shapes = {name: [*tensor.shape] for name, tensor in self._model.state_dict().items()}
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode([shapes, "adamw"], order="sorted"))

    def _state(self) -> dict[str, object]:
        model, optimizer = self._learner.policy, self._learner.optimizer
        return {
            "model": hf_tensors(self._model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "rng": torch.get_rng_state(),
        }

    def _set_state(self, state: dict[str, object]) -> None:
        self._model.load_state_dict(_part(state, "model"), strict=False)
        set_optimizer_state_dict(self._learner.policy, self._learner.optimizer, _part(state, "optimizer"))
        rng = state["rng"]
        if isinstance(rng, torch.Tensor):
            torch.set_rng_state(rng)


def _part(state: dict[str, object], name: str) -> dict[str, Any]:  # torch's own types for it are no more precise
    return cast("dict[str, Any]", state[name])


def _nothing() -> None:
    """A single rank has nothing to sum."""
