"""The critic: values before a step, its own update on the returns, its own optimizer.

Shapes: T tokens of a pack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from stages.learning.losses.critic import CriticConfig, value_loss
from stages.learning.update import OptimizerSettings, learning_rate, make_optimizer, set_learning_rate
from stages.training.batches import MicroBatch, spread
from stages.training.errors import TrainingError
from stages.training.placement import Placement
from stages.training.statistics import Tally


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

    def __init__(self, network: nn.Module, settings: CriticSettings, placement: Placement) -> None:
        self._network = network
        self.settings = settings
        self._placement = placement
        self._parameters = [p for p in network.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(network.parameters(), settings.optimizer)

    def values(self, batch: MicroBatch) -> Tensor:
        """[T], 0 where nothing is trained; with gradient where it is enabled."""
        if not batch.target_N.numel() and not self._placement.every_micro_batch:
            return torch.zeros_like(batch.weight_T)
        values_N: Tensor = self._network(batch.tokens_T, batch.layout, batch.target_N)
        return spread(values_N, batch)

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
        made, skipped = 0, list[str]()
        for number, batches in enumerate(mini_batches):
            for batch, old_T, return_T in zip(batches, old_values[number], returns[number], strict=True):
                self._backward(batch, old_T, return_T, tally)
            self._placement.sum_gradients(self._parameters)
            norm = self._placement.clip(self._parameters, self.settings.optimizer.max_grad_norm)
            if math.isfinite(norm):
                rate = learning_rate(self.settings.optimizer, num_updates_before + made)
                set_learning_rate(self._optimizer, rate)
                self._optimizer.step()
                made += 1
                tally.count("critic_grad_norm", norm, 1.0)
            else:
                skipped.append(f"non-finite critic gradient in mini-batch {number}")
            self._optimizer.zero_grad(set_to_none=True)
        return made, skipped

    def _backward(self, batch: MicroBatch, old_T: Tensor, return_T: Tensor, tally: Tally) -> None:
        values_T = self.values(batch)
        if not values_T.requires_grad:
            return
        loss_T, stats = value_loss(values_T, old_T, return_T, batch.loss.loss_mask_T, self.settings.loss)
        (loss_T * batch.weight_T).sum().backward()
        tally.add(stats)

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        self._placement.release(self._network)
        return {
            "critic": dict(self._network.state_dict()),
            "critic_optimizer": get_optimizer_state_dict(self._network, self._optimizer),
        }

    def set_state(self, state: dict[str, object]) -> None:
        """From a checkpoint."""
        weights, optimizer = state["critic"], state["critic_optimizer"]
        if not isinstance(weights, dict) or not isinstance(optimizer, dict):
            raise TrainingError("the checkpoint's critic is no table of tensors")
        self._network.load_state_dict(weights)
        set_optimizer_state_dict(self._network, self._optimizer, optimizer)

    def shapes(self) -> dict[str, list[int]]:
        """By name."""
        return {name: [*tensor.shape] for name, tensor in self._network.state_dict().items()}
