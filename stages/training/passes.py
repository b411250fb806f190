"""How the micro-batches of an update go through a model: one after the other here; over pipeline stages elsewhere.

A network gives one or more numbers for each trained token: the policy log-probs and entropies, a critic values. The loss is a
function that is called where they are. Shapes: T tokens of a pack, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stages.training.batches import MicroBatch, spread
from stages.training.statistics import Tally

LossOf = Callable[[MicroBatch, tuple[Tensor, ...]], Tensor]
"""(micro-batch, what the network gave, [T] each) → the loss to go backward from, a scalar."""


class Passes(Protocol):
    """What an update asks of a model; every call is collective among the ranks that share it."""

    def values(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """What the network gives first (log-probs, or a critic's values) without gradient: [T] a micro-batch, on every rank."""
        ...

    def backward(self, batches: Sequence[MicroBatch], temperature: float, loss_of: LossOf) -> None:
        """Forward, loss and backward of each micro-batch; gradients add up. The loss is asked for only on the ranks that have
        the network's end.
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

    def values(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        found: list[Tensor] = []
        for batch in batches:
            if batch.target_N.numel() or self._every_micro_batch:
                with torch.no_grad():
                    found.append(outputs(self._network, batch, temperature)[0])
            else:
                found.append(batch.weight_T.new_zeros(batch.weight_T.shape))
        return found

    def backward(self, batches: Sequence[MicroBatch], temperature: float, loss_of: LossOf) -> None:
        for batch in batches:
            if batch.target_N.numel() or self._every_micro_batch:
                loss_of(batch, outputs(self._network, batch, temperature)).backward()

    def share(self, tally: Tally) -> None:
        """Nothing: this rank counted."""


def outputs(network: nn.Module, batch: MicroBatch, temperature: float) -> tuple[Tensor, ...]:
    """What a network gives, at its places in the pack, [T] each, with gradient where it is enabled."""
    return placed(network(batch.tokens_T, batch.layout, batch.target_N, temperature), batch)


def placed(found_N: Sequence[Tensor], batch: MicroBatch) -> tuple[Tensor, ...]:
    """The trained tokens' numbers at their places in the pack, 0 elsewhere: [T] each."""
    return tuple(spread(one_N, batch) for one_N in found_N)
