"""Rules that look at all tokens of a mini-batch, on all ranks, before its first micro-batch is trained.

`prepare_minibatch` is called once per mini-batch with this rank's micro-batches and a function that gathers values of all ranks.
Tokens of equal value are treated alike, so that neither packing nor the spread over ranks can change a result.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.config import LossConfig
from stages.learning.losses.errors import LossInputError
from stages.learning.losses.importance import admit
from stages.learning.losses.kl_cov import KlCov

Gather = Callable[[Tensor], Tensor]
"""Takes this rank's values (1-D, any length), returns those of all ranks behind each other. Collective: every rank calls it equally often."""


def only_rank(x_N: Tensor) -> Tensor:
    """`Gather` of a trainer with one rank."""
    return x_N


def prepare_minibatch(batches: Sequence[LossBatch], config: LossConfig, gather: Gather) -> list[LossBatch]:
    """The micro-batches, with the masks and factors that depend on the whole mini-batch filled in."""
    prepared = list(batches)
    if config.m2po_threshold is not None:
        prepared = _with_m2po(prepared, config.m2po_threshold, gather)
    if isinstance(config.method, KlCov):
        prepared = _with_selection(prepared, config.method.fraction, gather)
    if config.normalise_weight:
        prepared = _with_weight_scale(prepared, config, gather)
    return prepared


def _with_m2po(batches: list[LossBatch], threshold: float, gather: Gather) -> list[LossBatch]:
    moments = [(batch.old_logp_T - _prox(batch)).square() for batch in batches]
    masks = [batch.loss_mask_T for batch in batches]
    cutoff = m2po_cutoff(gather(_masked(moments, masks)), threshold)
    kept = [mask_T & (moment_T <= cutoff) for moment_T, mask_T in zip(moments, masks, strict=True)]
    counts = gather(torch.stack([_count(masks), _count(kept)])).reshape(-1, 2).sum(0)
    scale = counts[0] / counts[1].clamp(min=1)
    return [replace(one, narrowed_T=keep_T, distill_scale=scale) for one, keep_T in zip(batches, kept, strict=True)]


def m2po_cutoff(moment_N: Tensor, threshold: float) -> Tensor:
    """Largest second moment that is kept: the values up to it have a mean below the threshold.

    If no set has (the smallest value alone is too large), the smallest is kept. Scalar; 0 of nothing.
    """
    if not len(moment_N):
        return moment_N.new_zeros(())
    ascending_N = moment_N.double().nan_to_num(nan=torch.inf).sort().values
    mean_N = ascending_N.cumsum(0) / torch.arange(1, len(ascending_N) + 1, device=moment_N.device)
    last_of_ties_N = torch.ones_like(ascending_N, dtype=torch.bool)
    last_of_ties_N[:-1] = ascending_N[1:] > ascending_N[:-1]
    good_N = ascending_N[last_of_ties_N & (mean_N < threshold)]
    return (good_N[-1] if len(good_N) else ascending_N[0]).to(moment_N.dtype)


def _with_selection(batches: list[LossBatch], fraction: float, gather: Gather) -> list[LossBatch]:
    masks = [batch.loss_mask_T for batch in batches]
    means = []
    for values in ([batch.advantages_T for batch in batches], [_prox(batch) for batch in batches]):
        all_N = gather(_masked(values, masks))
        means.append(all_N.sum() / max(len(all_N), 1))
    products = [(one.advantages_T - means[0]) * (_prox(one) - means[1]) for one in batches]
    all_N = gather(_masked(products, masks))
    if not len(all_N):
        return [replace(one, selected_T=mask_T) for one, mask_T in zip(batches, masks, strict=True)]
    smallest = all_N.topk(max(1, int(len(all_N) * fraction))).values[-1]
    return [
        replace(one, selected_T=one.loss_mask_T & (x_T >= smallest)) for one, x_T in zip(batches, products, strict=True)
    ]


def _with_weight_scale(batches: list[LossBatch], config: LossConfig, gather: Gather) -> list[LossBatch]:
    per_row = config.behaviour_weight != "token"
    parts: list[Tensor] = []
    for one in batches:
        weight_T = admit(
            _prox(one),
            one.old_logp_T,
            one.loss_mask_T,
            one.rows,
            filters=config.filters,
            weight=config.behaviour_weight,
            clamp=config.log_ratio_clamp,
        ).weight_T
        row_R = one.rows.mean(weight_T, one.loss_mask_T)[one.rows.count(one.loss_mask_T) > 0]
        parts.append(row_R if per_row else weight_T[one.loss_mask_T])
    all_N = gather(torch.cat(parts))
    mean = all_N.sum() / max(len(all_N), 1)
    scale = torch.where(mean > 0, 1 / mean, 1)
    return [replace(one, weight_scale=scale) for one in batches]


def _prox(batch: LossBatch) -> Tensor:
    if batch.prox_logp_T is None:
        raise LossInputError(
            "prepare_minibatch needs prox_logp_T: the log-probs of the policy that the mini-batch starts from"
        )
    return batch.prox_logp_T


def _masked(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    return torch.cat([x_T[mask_T] for x_T, mask_T in zip(values, masks, strict=True)])


def _count(masks: Sequence[Tensor]) -> Tensor:
    return torch.stack([mask_T.sum() for mask_T in masks]).sum()
