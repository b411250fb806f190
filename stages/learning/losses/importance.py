"""Off-policy correction: what a token weighs because another policy sampled it, and whether it is trained on at all.

d = log πprox − log πold. The behaviour weight is exp(d) of the token, or of its row (geometric mean or product). A filter looks at
a metric of the token or row and masks it, clamps its weight, or zeroes its weight (IcePop). Nothing here has a gradient.
Filters look at the original mask, each on its own, so their order is immaterial. Knows no policy loss.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor

from stages.learning.losses.batch import bounded_exp, log_ratio
from stages.learning.losses.checks import above, choice
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.kl import binary_kl
from stages.learning.rows import Rows

Level = Literal["token", "sequence"]
Action = Literal["mask", "clamp", "zero"]
Metric = Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"]
RowAggregation = Literal["mean", "sum", "max", "min"]
Direction = Literal["prox_over_old", "old_over_prox"]
BehaviourWeight = Literal["none", "token", "sequence_geometric", "sequence_product"]


class Filter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bound on how far the proximal policy may be from the one that sampled. Bounds are inclusive."""

    level: Level = "token"
    action: Action = "mask"
    """mask: drop what is outside (it stays in denominators); clamp: limit its weight to the bounds; zero: weight 0."""
    metric: Metric = "ratio"
    aggregation: RowAggregation = "mean"
    """sequence level: over the row's trained tokens; of d for `ratio` (then exp), of the metric itself otherwise."""
    upper: float | None
    """Above 1 for `ratio`. None: no upper bound."""
    lower: float | None = None
    """Above 0 for `ratio`. None: no lower bound (a clamp then goes down to 0)."""
    direction: Direction = "prox_over_old"
    """Sign of d in kl_k1 and kl_k3; the other metrics are the same both ways, except `ratio`, which is always prox/old."""

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            choice(getattr(self, field), allowed, f"filter.{field}")
        if self.upper is None and self.lower is None:
            raise LossConfigError("filter needs upper or lower: without either it lets everything through")
        if self.upper is not None and self.lower is not None and self.lower > self.upper:
            raise LossConfigError(f"filter.lower {self.lower} is above filter.upper {self.upper}")
        match self.metric:
            case "ratio":
                above(self.upper, 1, "filter.upper of metric ratio")
                above(self.lower, 0, "filter.lower of metric ratio")
            case "kl_k1":
                pass
            case _:
                above(self.upper, 0, f"filter.upper of metric {self.metric}")
        if self.action != "mask" and self.metric != "ratio":
            raise LossConfigError(
                f"filter.action {self.action} bounds the importance ratio: use metric ratio, not {self.metric}"
            )


_CHOICES: dict[str, object] = {
    "level": Level,
    "action": Action,
    "metric": Metric,
    "aggregation": RowAggregation,
    "direction": Direction,
}


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What the filters decided."""

    keep_T: Tensor
    """bool, m: trained tokens that no mask dropped."""
    weight_T: Tensor
    """Behaviour weight; 0 where not kept."""
    changed_T: Tensor
    """bool, trained tokens that a filter dropped or whose weight it changed."""


def admit(
    prox_logp_T: Tensor,
    old_logp_T: Tensor,
    mask_T: Tensor,
    rows: Rows,
    *,
    filters: tuple[Filter, ...],
    weight: BehaviourWeight,
    clamp: float | None = None,
) -> Admission:
    """Apply the filters to the trained tokens and weigh them.

    Args:
        prox_logp_T: proximal policy; junk outside the mask is allowed.
        old_logp_T: behaviour policy.
        mask_T: bool, d.
        rows: the rows.
        filters: any number; a token must pass all.
        weight: which behaviour weight tokens get.
        clamp: limit of log ratios before exp.
    """
    zero = prox_logp_T.new_zeros(())
    prox_T = torch.where(mask_T, prox_logp_T.detach(), zero)
    old_T = torch.where(mask_T, old_logp_T.detach(), zero)
    d_T = log_ratio(prox_T, old_T)
    weight_T = behaviour_weight(d_T, mask_T, rows, weight, clamp)
    keep_T, changed_T = mask_T, torch.zeros_like(mask_T)
    for one in filters:
        outside_T = mask_T & ~_inside(one, prox_T, old_T, mask_T=mask_T, rows=rows, clamp=clamp)
        match one.action:
            case "mask":
                keep_T = keep_T & ~outside_T
                changed_T = changed_T | outside_T
            case "clamp":
                limited_T = torch.where(outside_T, weight_T.clamp(one.lower or 0.0, one.upper), weight_T)
                changed_T = changed_T | (limited_T != weight_T)
                weight_T = limited_T
            case "zero":
                weight_T = torch.where(outside_T, 0, weight_T)
                changed_T = changed_T | outside_T
    return Admission(keep_T=keep_T, weight_T=torch.where(keep_T, weight_T, 0), changed_T=changed_T & mask_T)


def behaviour_weight(d_T: Tensor, mask_T: Tensor, rows: Rows, weight: BehaviourWeight, clamp: float | None) -> Tensor:
    """exp(d) per token or per row; 1 for every token with `none`."""
    match weight:
        case "none":
            return torch.ones_like(d_T)
        case "token":
            return bounded_exp(d_T, clamp)
        case "sequence_geometric":
            return rows.spread(bounded_exp(rows.mean(d_T, mask_T), clamp))
        case "sequence_product":
            return rows.spread(bounded_exp(rows.sum(torch.where(mask_T, d_T, 0)), clamp))


def _inside(one: Filter, prox_T: Tensor, old_T: Tensor, *, mask_T: Tensor, rows: Rows, clamp: float | None) -> Tensor:
    value_T = _metric(one, prox_T, old_T, clamp)
    if one.level == "sequence":
        value_T = rows.spread(_over_row(value_T, mask_T, rows, one.aggregation))
    if one.metric == "ratio":
        value_T = bounded_exp(value_T, clamp)
    # NaN compares false: a metric that can't be computed is outside.
    inside_T = ~value_T.isnan()
    if one.upper is not None:
        inside_T = inside_T & (value_T <= one.upper)
    if one.lower is not None:
        inside_T = inside_T & (value_T >= one.lower)
    return inside_T


def _metric(one: Filter, prox_T: Tensor, old_T: Tensor, clamp: float | None) -> Tensor:
    """Per-token metric; log ratio for `ratio`, which is exponentiated after the row's aggregation."""
    if one.metric == "ratio":
        return log_ratio(prox_T, old_T)
    if one.metric == "binary_kl":
        return torch.maximum(binary_kl(prox_T, old_T), binary_kl(old_T, prox_T))
    # Only a ratio may read two equal infinities as "the same"; a divergence of them is unknown, hence NaN, hence outside.
    d_T = prox_T - old_T if one.direction == "prox_over_old" else old_T - prox_T
    d_T = d_T if clamp is None else d_T.clamp(-clamp, clamp)
    match one.metric:
        case "kl_k1":
            return d_T
        case "kl_k2":
            return d_T.square() / 2
        case "kl_k3":
            return torch.expm1(-d_T) + d_T


def _over_row(value_T: Tensor, mask_T: Tensor, rows: Rows, aggregation: RowAggregation) -> Tensor:
    match aggregation:
        case "mean":
            return rows.mean(value_T, mask_T)
        case "sum":
            return rows.sum(torch.where(mask_T, value_T, 0))
        case "max":
            return rows.extreme(value_T, mask_T, largest=True, empty=0.0)
        case "min":
            return rows.extreme(value_T, mask_T, largest=False, empty=0.0)


class OffPolicySequenceMask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take the policy gradient from rows that are pushed down and have drifted (DeepSeek-V3.2, arXiv:2512.02556).

    A token with A < 0 gets weight 0 where its row's mean of (log πref − log πθ) exceeds `delta`.
    """

    delta: float
    against: Literal["old", "prox"] = "old"
    """Which policy the drift is measured from."""

    def __post_init__(self) -> None:
        above(self.delta, 0, "off_policy_sequence_mask.delta")
        choice(self.against, Literal["old", "prox"], "off_policy_sequence_mask.against")


def drifted(
    logp_T: Tensor, base_logp_T: Tensor, *, advantages_T: Tensor, mask_T: Tensor, rows: Rows, delta: float
) -> Tensor:
    """Trained tokens that the off-policy sequence mask silences, bool [T]."""
    drift_T = rows.spread(rows.mean(log_ratio(base_logp_T, logp_T.detach()), mask_T))
    return mask_T & (advantages_T < 0) & (drift_T > delta)
