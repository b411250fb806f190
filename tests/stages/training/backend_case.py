"""What ranks do in the tests of the backends: train some steps, give back gradients, weights and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from training_case import SPEC, plan, step_of

from stages.learning.losses.config import LossConfig
from stages.learning.update import OptimizerSettings
from stages.policy.tiny import make_policy_folder
from stages.training.backends import ModelSettings, hf_backend
from stages.training.fsdp2_placement import Fsdp2Placement
from stages.training.placement import Placement, WholePlacement
from stages.training.ranks import Ranks
from stages.training.step_backend import StepBackend, StepSettings

# eps as large as the gradients: AdamW then keeps differences of rounding small instead of blowing them up to ±lr
OPTIMIZER = OptimizerSettings(lr=3e-3, weight_decay=0.01, max_grad_norm=0.5, warmup_updates=3, eps=1e-3)


class Recording:
    """A placement that remembers each update's gradients before they are clipped."""

    def __init__(self, inner: Placement) -> None:
        self._inner = inner
        self.gradients: list[list[torch.Tensor]] = []
        self.names: list[list[str]] = []
        self._known: dict[int, str] = {}

    def know(self, network: torch.nn.Module) -> None:
        """Its parameters' names."""
        self._known |= {id(p): name for name, p in network.named_parameters()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        with_gradient = [p for p in parameters if p.grad is not None]
        self.gradients.append([self._inner.whole(p.grad).clone() for p in with_gradient])
        self.names.append([self._known.get(id(p), "") for p in with_gradient])
        return self._inner.clip(parameters, max_norm)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained."""

    folder: str
    models: ModelSettings = ModelSettings()
    loss: LossConfig = LossConfig()
    first_step: int = 1
    last_step: int = 1
    num_rows: int = 14
    budget: int = 97
    mini_batches: int = 2
    algorithm: str = "grpo"
    checkpoint_every: int = 0
    async_checkpoints: bool = True
    generation: int = 1


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, on one rank."""

    gradients: list[list[np.ndarray]]
    names: list[list[str]]
    """Of the gradients' parameters, as their modules name them."""
    weights: dict[str, np.ndarray]
    stats: list[dict[str, float]]
    num_rows: int
    resumed: int
    skipped: str


def policy_folder(folder: Path) -> Path:
    """The tiny policy, made once."""
    if not (folder / "policy" / "config.json").exists():
        make_policy_folder(folder / "policy", SPEC)
    return folder / "policy"


def settings_of(case: Case) -> StepSettings:
    return StepSettings(
        model_folder=str(Path(case.folder) / "policy"),
        checkpoint_dir=str(Path(case.folder) / "checkpoints"),
        optimizer=OPTIMIZER,
        loss=case.loss,
        async_checkpoints=case.async_checkpoints,
    )


def train_case(ranks: Ranks, case: Case) -> Outcome:
    """Resume, train the steps, checkpoint where asked."""
    torch.manual_seed(0)
    inner = WholePlacement(ranks) if case.models.fsdp2 is None else Fsdp2Placement(ranks, case.models.fsdp2)
    placement = Recording(inner)
    backend = hf_backend(settings_of(case), case.models, plan(case.budget), ranks, placement)
    placement.know(backend._policy.network)
    if (critic := backend._guides.critic) is not None:
        placement.know(critic._model.network)
    return outcome_of(backend, placement, case)


def outcome_of(backend: StepBackend, placement: Recording, case: Case) -> Outcome:
    resumed = backend.resume() if case.checkpoint_every else 0
    stats, skipped, num_rows = [], "", 0
    for number in range(max(case.first_step, resumed + 1), case.last_step + 1):
        manifest, rows = step_of(number, num_rows=case.num_rows, mini_batches=case.mini_batches)
        manifest = msgspec.structs.replace(manifest, algorithm=case.algorithm)
        needed = backend.rows_needed(manifest)
        num_rows += len(needed)
        result = backend.train(manifest, {i: rows[i] for i in needed})
        stats.append(dict(result.stats))
        skipped += result.skipped
        if case.checkpoint_every and number % case.checkpoint_every == 0:
            backend.save_checkpoint(number, case.generation)
    weights = {name: tensor.float().numpy().copy() for name, tensor in backend._whole_tensors().items()}
    backend.close()
    return Outcome(
        gradients=[[g.float().numpy().copy() for g in update] for update in placement.gradients],
        names=placement.names,
        weights=weights,
        stats=stats,
        num_rows=num_rows,
        resumed=resumed,
        skipped=skipped,
    )


def largest_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    assert len(one) == len(other)
    assert [x.shape for x in one] == [x.shape for x in other]
    return max(float(np.abs(x - y).max()) for x, y in zip(one, other, strict=True))


def assert_same_gradients(found: Outcome, expected: Outcome, bound: float = 1e-5) -> None:
    assert len(found.gradients) == len(expected.gradients) > 0
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert max(float(np.abs(x).max()) for x in other) > 1e-2
        assert largest_difference(one, other) < bound


class _Gathering:
    """A placement of Megatron's that remembers whole gradients under HF names."""

    def __init__(self, inner: Any, model: Any, into: Recording) -> None:
        self._inner = inner
        self._model = model
        self._into = into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        whole = self._model.gathered(self._model._as_hf({name: p.grad for name, p in self._model.trained()}))
        self._into.names.append(sorted(whole))
        self._into.gradients.append([whole[name] for name in sorted(whole)])
        return self._inner.clip(parameters, max_norm)


def train_megatron(ranks: Ranks, case: Case, tensor_parallel: int, pipeline_parallel: int = 1) -> Outcome:
    """The same over Megatron-Core; gradients come back whole, under HF names in order, on rank 0."""
    from stages.training.megatron.backend import (  # noqa: PLC0415 - slow to import
        MegatronSettings,
        open_megatron_backend,
    )

    torch.manual_seed(0)
    megatron = MegatronSettings(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    with open_megatron_backend(settings_of(case), case.models, plan(case.budget), ranks, megatron) as backend:
        found = Recording(backend._placement)
        gathering = _Gathering(backend._placement, backend._policy, found)
        parameters = backend._learner.parameters
        backend._learner = msgspec.structs.replace(
            backend._learner, clip=lambda limit: gathering.clip(parameters, limit)
        )
        if (critic := backend._guides.critic) is not None:
            critic._placement = _Gathering(critic._placement, critic._model, found)
        return outcome_of(backend, found, case)
