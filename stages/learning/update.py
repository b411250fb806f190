"""From accumulated gradients to a step: sum over ranks, norm, clip, the optimizer's schedule.

Collectives come as functions; no process group is known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor, nn

from stages.learning.losses.errors import LossConfigError

Reduce = Callable[[Tensor], None]
"""Sums a tensor over all ranks, in place."""
_BUFFER_ITEMS: Final = 1 << 24
"""Gradients are summed in flat buffers of at most this many float32 (64 MB)."""


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW and its schedule."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices; never to norms and other vectors."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; 0 = no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    """Updates in which the rate rises linearly from lr / warmup_updates."""
    total_updates: int = 0
    """Updates after which a linear or cosine schedule has reached `min_lr_ratio`; required by both."""
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise LossConfigError(f"lr: expected above 0, found {self.lr}")
        if self.schedule != "constant" and self.total_updates <= self.warmup_updates:
            raise LossConfigError(
                f"schedule {self.schedule} needs total_updates above warmup_updates ({self.warmup_updates}), "
                f"found {self.total_updates}"
            )


def learning_rate(settings: OptimizerSettings, update: int) -> float:
    """The rate of an update, counted from 0: a function of its number alone, so a resume needs no scheduler state."""
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.lr
    span = settings.total_updates - settings.warmup_updates
    done = min(1.0, (update - settings.warmup_updates) / span)
    left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def make_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over the trainable parameters."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, foreach=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def sum_gradients(parameters: Sequence[nn.Parameter], reduce: Reduce) -> None:
    """Sum every gradient over the ranks, in flat buffers; a parameter without one takes part with zeros."""
    batch: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if batch and size + parameter.numel() > _BUFFER_ITEMS:
            _sum_batch(batch, reduce)
            batch, size = [], 0
        batch.append(parameter)
        size += parameter.numel()
    if batch:
        _sum_batch(batch, reduce)


def _sum_batch(batch: Sequence[nn.Parameter], reduce: Reduce) -> None:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in batch]
    flat = torch.cat([part.flatten() for part in parts])
    reduce(flat)
    for parameter, part in zip(batch, flat.split([p.numel() for p in batch]), strict=True):
        parameter.grad = part.view_as(parameter).clone()


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients to a global norm of `max_norm` where it is larger; the norm before (not finite: untouched)."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return 0.0
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in grads])))
    if math.isfinite(norm) and max_norm > 0 and norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + _EPS))
    return norm


_EPS: Final = 1e-6
"""As in torch's clip_grad_norm_: keeps the clipped norm at or below the limit after rounding."""
