"""Gradients and norms of a model of Megatron-Core's layers over the ranks that share it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stages.learning.update import sum_gradients
from stages.training.megatron.groups import Groups
from stages.training.megatron.weights import MegatronWeights


class MegatronPlacement:
    """Gradients over the data-parallel ranks, norms over the tensor-parallel ones and the stages. Other models are whole on every
    rank.
    """

    def __init__(self, device: torch.device, groups: Groups, model: MegatronWeights) -> None:
        self._device = device
        self._data = groups.data
        self._tensor = groups.tensor
        self._stages = groups.stages
        self._ends = groups.ends
        self._tied = model.tied_parameters()
        self._copied = model.copied_parameters()
        self._partial = model.partial_parameters()
        self._divided = model.divided_parameters()

    @property
    def every_micro_batch(self) -> bool:
        """The stages of a pipeline wait for each other's states."""
        return self._stages.world_size > 1

    def place(self, module: nn.Module, blocks: Sequence[nn.Module], *, trained: bool) -> nn.Module:
        del blocks, trained
        return module.to(self._device)

    def release(self, module: nn.Module) -> None:
        """Nothing was gathered."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        shares = [p for p in parameters if id(p) in self._partial]
        if self._tensor.world_size > 1:
            sum_gradients(shares, self._tensor.sum)
        if self._data.world_size > 1:
            sum_gradients(parameters, self._data.sum)
        if self._tied and self._ends is not None:
            sum_gradients(self._tied, self._ends.sum)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        squares = torch.zeros(2, device=self._device)
        with_gradient = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, grad in with_gradient:
            if id(parameter) in self._copied:  # counted where it lies first
                continue
            squares[int(id(parameter) in self._divided)] += grad.float().square().sum()
        divided = squares[1:].clone()
        self._tensor.sum(divided)
        total = squares[:1] + divided
        self._stages.sum(total)
        norm = float(total[0].sqrt())
        if math.isfinite(norm) and max_norm > 0 and norm > max_norm:
            for _, grad in with_gradient:
                grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().contiguous()
