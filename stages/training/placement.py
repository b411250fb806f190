"""How the parameters and gradients of a module lie over the ranks: the one thing in which the torch backends differ.

A placement knows no loss and no manifest; whoever trains a module (the policy, a critic) or only runs it (a reference, a
teacher) asks the same placement. Here: the whole module on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stages.learning.update import clip_gradients, sum_gradients
from stages.training.ranks import Ranks


class Placement(Protocol):
    """What a trainer asks of it; every call is collective."""

    @property
    def every_micro_batch(self) -> bool:
        """Forward and backward hold collectives: a rank without rows runs one token of weight 0."""
        ...

    def place(self, module: nn.Module, blocks: Sequence[nn.Module], *, trained: bool) -> nn.Module:
        """Put a module on this rank's device, split at `blocks` where it is split at all."""
        ...

    def release(self, module: nn.Module) -> None:
        """Let go of what a pass without gradient gathered: before parameters are read or changed."""
        ...

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make each gradient the sum over the data-parallel ranks."""
        ...

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Clip to a global norm; the norm before (not finite: gradients untouched)."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A parameter in one piece, on the CPU; where it is split, only rank 0 is sure to have it."""
        ...


class WholePlacement:
    """Every rank has the whole module."""

    every_micro_batch = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def place(self, module: nn.Module, blocks: Sequence[nn.Module], *, trained: bool) -> nn.Module:
        del blocks, trained
        return module.to(self._ranks.device)

    def release(self, module: nn.Module) -> None:
        """Nothing was gathered."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._ranks.world_size > 1:
            sum_gradients(parameters, self._ranks.sum)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        return clip_gradients(parameters, max_norm)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(torch.device("cpu")).contiguous()
