"""The critic: values before a step, its own update on the returns, its own optimizer.

Shapes: T tokens of a pack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from torch import Tensor

from stages.learning.losses.critic import CriticConfig, value_loss
from stages.learning.update import OptimizerSettings, learning_rate, make_optimizer, set_learning_rate
from stages.training.batches import MicroBatch
from stages.training.errors import TrainingError
from stages.training.passes import Passes
from stages.training.placement import Placement
from stages.training.policies import TrainedModel
from stages.training.statistics import Tally

_NO_TEMPERATURE: Final = 1.0


class CriticSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A critic beside the policy."""

    folder: str = ""
    """HF folder that its decoder starts from; empty: the policy's version 0."""
    loss: CriticConfig = CriticConfig()
    optimizer: OptimizerSettings = OptimizerSettings()
    warmup_steps: int = 0
    """Steps in which only the critic is trained."""


class Critic:
    """One rank's critic."""

    def __init__(self, model: TrainedModel, settings: CriticSettings, placement: Placement, passes: Passes) -> None:
        self._model = model
        self.settings = settings
        self._placement = placement
        self._passes = passes
        self._parameters = [p for p in model.network.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(model.network.parameters(), settings.optimizer)

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Without gradient: [T] a micro-batch, 0 where nothing is trained."""
        return self._passes.values(batches, _NO_TEMPERATURE)

    def train(
        self,
        mini_batches: Sequence[Sequence[MicroBatch]],
        old_values: Sequence[Sequence[Tensor]],
        returns: Sequence[Sequence[Tensor]],
        tally: Tally,
        *,
        num_updates_before: int,
    ) -> tuple[int, list[str]]:
        """An update a mini-batch; how many were made, and what was skipped and why."""
        made, skipped, counted = 0, list[str](), Tally()
        for number, batches in enumerate(mini_batches):
            wanted = dict(zip(map(id, batches), zip(old_values[number], returns[number], strict=True), strict=True))
            self._passes.backward(batches, _NO_TEMPERATURE, partial(self._loss, wanted, counted))
            self._placement.sum_gradients(self._parameters)
            norm = self._placement.clip(self._parameters, self.settings.optimizer.max_grad_norm)
            if math.isfinite(norm):
                rate = learning_rate(self.settings.optimizer, num_updates_before + made)
                set_learning_rate(self._optimizer, rate)
                self._optimizer.step()
                made += 1
                counted.count("critic_grad_norm", norm, 1.0)
            else:
                skipped.append(f"non-finite critic gradient in mini-batch {number}")
            self._optimizer.zero_grad(set_to_none=True)
        self._passes.share(counted)
        tally.include(counted)
        return made, skipped

    def _loss(
        self, wanted: Mapping[int, tuple[Tensor, Tensor]], tally: Tally, batch: MicroBatch, found: tuple[Tensor, ...]
    ) -> Tensor:
        (values_T,), (old_T, return_T) = found, wanted[id(batch)]
        loss_T, stats = value_loss(values_T, old_T, return_T, batch.loss.loss_mask_T, self.settings.loss)
        tally.add(stats)
        return (loss_T * batch.weight_T).sum()

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"critic": self._model.saved(), "critic_optimizer": self._model.optimizer_state(self._optimizer)}

    def set_state(self, state: dict[str, object]) -> None:
        """From a checkpoint."""
        weights, optimizer = state["critic"], state["critic_optimizer"]
        if not isinstance(weights, dict) or not isinstance(optimizer, dict):
            raise TrainingError("the checkpoint's critic is no table of tensors")
        self._model.load(weights)
        self._model.set_optimizer_state(self._optimizer, optimizer)

    def shapes(self) -> dict[str, list[int]]:
        """By name."""
        return self._model.saved_shapes()
