"""How the micro-batches of an update go through the model: one after the other here; over pipeline stages elsewhere.

The loss is a function that is called where the log-probs are. Shapes: T tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stages.training.batches import MicroBatch, spread
from stages.training.statistics import Tally

LossOf = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""(micro-batch, log-probs [T], entropies [T]) → the loss to go backward from, a scalar."""


class Passes(Protocol):
    """What an update asks of the model; every call is collective among the ranks that share it."""

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Each micro-batch's log-probs without gradient, [T], on every rank."""
        ...

    def backward(self, batches: Sequence[MicroBatch], temperature: float, loss_of: LossOf) -> None:
        """Forward, loss and backward of each micro-batch; gradients add up. The loss is asked for only on the ranks that have
        the log-probs.
        """
        ...

    def share(self, tally: Tally) -> None:
        """Give what was counted where losses were computed to the other ranks of the model."""
        ...


class WholePasses:
    """The model's every layer is computed on this rank."""

    def __init__(self, network: nn.Module, *, every_micro_batch: bool) -> None:
        self._network = network
        self._every_micro_batch = every_micro_batch

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        found: list[Tensor] = []
        for batch in batches:
            if batch.target_N.numel() or self._every_micro_batch:
                with torch.no_grad():
                    found.append(logprobs(self._network, batch, temperature)[0])
            else:
                found.append(batch.weight_T.new_zeros(batch.weight_T.shape))
        return found

    def backward(self, batches: Sequence[MicroBatch], temperature: float, loss_of: LossOf) -> None:
        for batch in batches:
            if batch.target_N.numel() or self._every_micro_batch:
                loss_of(batch, *logprobs(self._network, batch, temperature)).backward()

    def share(self, tally: Tally) -> None:
        """Nothing: this rank counted."""


def logprobs(network: nn.Module, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies at their places in the pack, [T], with gradient where it is enabled."""
    logp_N, entropy_N = network(batch.tokens_T, batch.layout, batch.target_N, temperature)
    return spread(logp_N, batch), spread(entropy_N, batch)
