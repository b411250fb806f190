"""One step: mini-batches in order, each an optimizer update over its micro-batches on all ranks.

micro-batch ─forward─▶ log-probs ─loss─▶ Σ_t w_t·ℓ_t ─backward─▶ gradients ─sum over ranks─▶ clip ─▶ AdamW
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch
from torch import Tensor, nn

from stages.learning.losses.config import LossConfig
from stages.learning.losses.kl_cov import KlCov
from stages.learning.losses.minibatch import prepare_minibatch
from stages.learning.losses.policy import policy_loss
from stages.learning.losses.proximal import require_finite
from stages.learning.update import OptimizerSettings, clip_gradients, learning_rate, set_learning_rate
from stages.training.batches import MicroBatch
from stages.training.passes import Passes
from stages.training.ranks import Ranks
from stages.training.statistics import Tally, mismatch


class Learner(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an update needs."""

    passes: Passes
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    """The trained ones."""
    ranks: Ranks
    """Those among which rows are dealt."""
    loss: LossConfig
    optimizer_settings: OptimizerSettings
    sum_gradients: Callable[[], None]
    """Makes each gradient the sum over all ranks."""
    clip: Callable[[float], float] | None = None
    """Clips and gives the global norm where gradients are sharded."""


def train_mini_batches(
    learner: Learner, mini_batches: Sequence[Sequence[MicroBatch]], *, temperature: float, num_updates_before: int
) -> tuple[dict[str, float], list[str], int]:
    """All updates of a step: global statistics, what was skipped and why, and how many updates were made."""
    tally = Tally()
    skipped: list[str] = []
    made = 0
    mini_batches = _with_proximal(learner, mini_batches, temperature)
    for number, batches in enumerate(mini_batches):
        prepared = _prepared(learner, batches)
        learner.passes.backward(prepared, temperature, partial(_loss, learner.loss, tally, first=number == 0))
        learner.sum_gradients()
        limit = learner.optimizer_settings.max_grad_norm
        norm = learner.clip(limit) if learner.clip else clip_gradients(learner.parameters, limit)
        if math.isfinite(norm):
            rate = learning_rate(learner.optimizer_settings, num_updates_before + made)
            set_learning_rate(learner.optimizer, rate)
            learner.optimizer.step()
            made += 1
            tally.count("grad_norm", norm, 1.0)
            tally.count("lr", rate, 1.0)
        else:
            skipped.append(f"non-finite gradient in mini-batch {number}")
        learner.optimizer.zero_grad(set_to_none=True)
    learner.passes.share(tally)
    return tally.means(learner.ranks), skipped, made


def _loss(config: LossConfig, tally: Tally, batch: MicroBatch, outputs: tuple[Tensor, ...], *, first: bool) -> Tensor:
    """Σ_t w_t·ℓ_t of a micro-batch; counts its statistics."""
    logp_T, entropy_T = outputs
    inputs = replace(batch.loss, entropy_T=entropy_T if config.entropy_coef else entropy_T.detach())
    if first and config.proximal == "recompute" and inputs.prox_logp_T is None:
        # the step's first update starts from the very weights that the proximal policy has
        inputs = replace(inputs, prox_logp_T=logp_T.detach())
    loss_T, stats = policy_loss(logp_T, inputs, config)
    loss = (loss_T * batch.weight_T).sum()
    tally.add(stats)
    tally.count("step_loss", float(loss.detach()), 0.0)
    if first:
        found, largest = mismatch(logp_T, batch.loss)
        tally.add(found)
        tally.peak("mismatch/max", largest)
    return loss


def _with_proximal(
    learner: Learner, mini_batches: Sequence[Sequence[MicroBatch]], temperature: float
) -> Sequence[Sequence[MicroBatch]]:
    """Fill in the recomputed log-probs with the weights before the first update."""
    if learner.loss.proximal != "recompute":
        return mini_batches
    found: list[list[MicroBatch]] = []
    for number, batches in enumerate(mini_batches):
        if number == 0 and not _looks_ahead(learner.loss):
            found.append(list(batches))
            continue
        filled: list[MicroBatch] = []
        for batch, prox_T in zip(batches, learner.passes.values(batches, temperature), strict=True):
            require_finite(prox_T, batch.loss.loss_mask_T)
            filled.append(msgspec.structs.replace(batch, loss=replace(batch.loss, prox_logp_T=prox_T)))
        found.append(filled)
    return found


def _looks_ahead(loss: LossConfig) -> bool:
    """A rule over the whole mini-batch needs the proximal log-probs before the first micro-batch."""
    return loss.m2po_threshold is not None or loss.normalise_weight or isinstance(loss.method, KlCov)


def _prepared(learner: Learner, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    if not _looks_ahead(learner.loss):
        return list(batches)
    losses = prepare_minibatch([batch.loss for batch in batches], learner.loss, learner.ranks.gather)
    return [msgspec.structs.replace(batch, loss=loss) for batch, loss in zip(batches, losses, strict=True)]
