"""The policy loss of one micro-batch: proximal policy → filters and weights → method → penalties → statistics.

    logp ─┐
    old  ─┼─ proximal policy ─ admit ──────────── keep m, weight w ─┐
    batch ┘                                                        ├─ ℓ = w·method(r, A) + kl − entropy + teacher, 0 outside m
              advantages (teacher form) ─ method(tokens) ──────────┘

Pure: packed tokens in, per-token losses and sums out; row weights, reductions over ranks and the optimizer are the trainer's.
Values outside the loss mask are replaced before anything is computed from them, so that no NaN there can reach a loss or a gradient.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.learning.losses.batch import LossBatch, Stat, Surrogate, Tokens, bounded_exp, log_ratio
from stages.learning.losses.config import Distillation, LossConfig
from stages.learning.losses.errors import LossInputError
from stages.learning.losses.importance import Admission, admit, drifted
from stages.learning.losses.kl import kl_estimate
from stages.learning.losses.methods import surrogate
from stages.learning.losses.proximal import proximal_logp


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Everything per token, for statistics and for whoever looks at one token. Values outside d are 0."""

    loss_T: Tensor
    """ℓ, 0 where not kept. The only value with a gradient."""
    policy_T: Tensor
    """The method's part of it, weighted."""
    method: Surrogate
    mask_T: Tensor
    """bool, d."""
    keep_T: Tensor
    """bool, m."""
    weight_T: Tensor
    """Factor of the method's loss: behaviour weight times the given one."""
    admission: Admission
    """What the filters alone decided."""
    logp_T: Tensor
    anchor_logp_T: Tensor
    old_logp_T: Tensor
    kl_T: Tensor | None
    teacher_gap_T: Tensor | None
    """log π − log πteacher."""


def policy_loss(logp_T: Tensor, batch: LossBatch, config: LossConfig) -> tuple[Tensor, dict[str, Stat]]:
    """Per-token loss ℓ [T] (0 outside m) and statistics as sums with their counts.

    Args:
        logp_T: log-probs of the current policy, with gradient.
        batch: the tokens.
        config: the settings.

    Raises:
        LossInputError: the settings need something that the batch lacks.
    """
    terms = policy_terms(logp_T, batch, config)
    return terms.loss_T, statistics(terms, batch)


@dataclass(frozen=True, kw_only=True)
class _Policies:
    """Cleaned log-probs of the policies of one micro-batch."""

    logp_T: Tensor
    anchor_T: Tensor
    old_T: Tensor
    gap_T: Tensor | None
    """log π − log πteacher, where there is a teacher."""


def policy_terms(logp_T: Tensor, batch: LossBatch, config: LossConfig) -> Terms:
    """The loss with all its parts."""
    mask_T = batch.loss_mask_T
    logp_T, old_T = _clean(logp_T, mask_T), _clean(batch.old_logp_T, mask_T)
    anchor_T = _anchor(logp_T, old_T, batch, config)
    admission = admit(
        anchor_T,
        old_T,
        mask_T,
        batch.rows,
        filters=config.filters,
        weight=config.behaviour_weight,
        clamp=config.log_ratio_clamp,
    )
    keep_T = _narrow(admission.keep_T, batch, config)
    logp_T, anchor_T = _without_dead_ratios(logp_T, anchor_T, keep_T)
    gap_T = None
    if config.distillation is not None:
        gap_T = log_ratio(logp_T, _given(batch.teacher_logp_T, "teacher_logp_T", mask_T))
    policies = _Policies(logp_T=logp_T, anchor_T=anchor_T, old_T=old_T, gap_T=gap_T)
    tokens = _tokens(policies, admission, keep_T, batch, config)
    method = surrogate(tokens, config.method)
    policy_T = _only(method.loss_T if method.weighted else method.loss_T * tokens.weight_T, keep_T)
    loss_T, kl_T = _with_penalties(policy_T, policies, batch, config)
    return Terms(
        loss_T=_only(loss_T, keep_T),
        policy_T=policy_T.detach(),
        method=_detached(method),
        mask_T=mask_T,
        keep_T=keep_T,
        weight_T=tokens.weight_T,
        admission=admission,
        logp_T=logp_T.detach(),
        anchor_logp_T=anchor_T,
        old_logp_T=old_T,
        kl_T=None if kl_T is None else kl_T.detach(),
        teacher_gap_T=None if gap_T is None else gap_T.detach(),
    )


def statistics(terms: Terms, batch: LossBatch) -> dict[str, Stat]:
    """Sums over the trained tokens (before rejection, unless the name says otherwise) with their counts."""
    method, keep_T = terms.method, terms.keep_T
    drift_T = log_ratio(terms.anchor_logp_T, terms.old_logp_T)
    over_trained: dict[str, Tensor] = {
        "loss": terms.loss_T,
        "policy_loss": terms.policy_T,
        "ratio": method.ratio_T,
        "approx_kl": log_ratio(terms.logp_T, terms.anchor_logp_T),
        "clip_fraction": method.clipped_T,
        "filtered_fraction": terms.admission.changed_T,
        "rejected_fraction": terms.mask_T & ~keep_T,
        "logp": terms.logp_T,
        "old_logp": terms.old_logp_T,
        "prox_logp": terms.anchor_logp_T,
        "behaviour_kl": drift_T,
        "advantage": _clean(batch.advantages_T, terms.mask_T),
        **(method.extra or {}),
    }
    optional = {
        "dual_clip_fraction": method.dual_clipped_T,
        "kl_to_reference": terms.kl_T,
        "teacher_gap": terms.teacher_gap_T,
        "entropy": None if batch.entropy_T is None else _clean(batch.entropy_T, terms.mask_T),
        "staleness": _staleness(batch),
    }
    over_trained |= {name: value for name, value in optional.items() if value is not None}
    found = {name: _sum(value, terms.mask_T) for name, value in over_trained.items()}
    found["behaviour_weight"] = _sum(terms.weight_T, keep_T)
    found["clipped_logp"] = _sum(terms.logp_T, keep_T & method.clipped_T)
    found["clipped_old_logp"] = _sum(terms.old_logp_T, keep_T & method.clipped_T)
    return found


def _staleness(batch: LossBatch) -> Tensor | None:
    """Versions between the one that sampled a token and the one that its update starts from."""
    if batch.versions_T is None or batch.current_version is None:
        return None
    return batch.current_version - 1 - batch.versions_T


def _detached(method: Surrogate) -> Surrogate:
    """The same values without the graph, which would keep every activation alive as long as the statistics."""
    extra = None if method.extra is None else {name: value_T.detach() for name, value_T in method.extra.items()}
    return replace(method, loss_T=method.loss_T.detach(), ratio_T=method.ratio_T.detach(), extra=extra)


def _anchor(logp_T: Tensor, old_T: Tensor, batch: LossBatch, config: LossConfig) -> Tensor:
    given_T = None if batch.prox_logp_T is None else _clean(batch.prox_logp_T, batch.loss_mask_T)
    return proximal_logp(
        config.proximal,
        logp_T,
        old_T,
        given_T=given_T,
        versions_T=batch.versions_T,
        current_version=batch.current_version,
    )


def _narrow(keep_T: Tensor, batch: LossBatch, config: LossConfig) -> Tensor:
    if config.m2po_threshold is not None and batch.narrowed_T is None:
        raise LossInputError(
            "m2po_threshold needs the mini-batch's mask: call prepare_minibatch before the first micro-batch"
        )
    return keep_T if batch.narrowed_T is None else keep_T & batch.narrowed_T


def _without_dead_ratios(logp_T: Tensor, anchor_T: Tensor, keep_T: Tensor) -> tuple[Tensor, Tensor]:
    """Give dropped tokens whose ratio is not finite a ratio of 1: their loss is 0, but 0·∞ in its gradient would be NaN."""
    dead_T = ~keep_T & ~log_ratio(logp_T.detach(), anchor_T).exp().isfinite()
    return torch.where(dead_T, 0, logp_T), torch.where(dead_T, 0, anchor_T)


def _advantages(batch: LossBatch, distillation: Distillation | None, gap_T: Tensor | None) -> Tensor:
    advantages_T = _clean(batch.advantages_T, batch.loss_mask_T)
    if distillation is None or gap_T is None or distillation.form == "loss":
        return advantages_T
    return distillation.rl_weight * advantages_T - distillation.coef * gap_T.detach()


def _tokens(policies: _Policies, admission: Admission, keep_T: Tensor, batch: LossBatch, config: LossConfig) -> Tokens:
    advantages_T = _advantages(batch, config.distillation, policies.gap_T)
    return Tokens(
        logp_T=policies.logp_T,
        anchor_logp_T=policies.anchor_T,
        advantages_T=advantages_T,
        mask_T=batch.loss_mask_T,
        keep_T=keep_T,
        weight_T=_weight(admission.weight_T, policies, advantages_T, batch, config),
        rows=batch.rows,
        log_ratio_clamp=config.log_ratio_clamp,
        selected_T=batch.selected_T,
    )


def _weight(
    weight_T: Tensor, policies: _Policies, advantages_T: Tensor, batch: LossBatch, config: LossConfig
) -> Tensor:
    mask_T, rule = batch.loss_mask_T, config.off_policy_sequence_mask
    if config.normalise_weight:
        if batch.weight_scale is None:
            raise LossInputError("normalise_weight needs a mean over the mini-batch: call prepare_minibatch first")
        weight_T = weight_T * batch.weight_scale
    if batch.importance_weight_T is not None:
        weight_T = weight_T * _clean(batch.importance_weight_T, mask_T)
    if rule is not None:
        base_T = policies.old_T if rule.against == "old" else policies.anchor_T
        silent_T = drifted(
            policies.logp_T, base_T, advantages_T=advantages_T, mask_T=mask_T, rows=batch.rows, delta=rule.delta
        )
        weight_T = torch.where(silent_T, 0, weight_T)
    return weight_T.detach()


def _with_penalties(
    policy_T: Tensor, policies: _Policies, batch: LossBatch, config: LossConfig
) -> tuple[Tensor, Tensor | None]:
    loss_T, kl_T, mask_T = policy_T, None, batch.loss_mask_T
    if config.distillation is not None and policies.gap_T is not None and config.distillation.form == "loss":
        loss_T = _distilled(policy_T, policies, policies.gap_T, batch, config)
    if config.kl_penalty is not None:
        kl_T = kl_estimate(
            policies.logp_T, _given(batch.ref_logp_T, "ref_logp_T", mask_T), config.kl_penalty, policies.old_T
        )
        loss_T = loss_T + config.kl_penalty.coef * kl_T
    if config.entropy_coef:
        loss_T = loss_T - config.entropy_coef * _given(batch.entropy_T, "entropy_T", mask_T)
    return loss_T, kl_T


def _distilled(policy_T: Tensor, policies: _Policies, gap_T: Tensor, batch: LossBatch, config: LossConfig) -> Tensor:
    """rl_weight·ℓ and the teacher's term; alone, the term is a policy gradient with the teacher's gap as advantage."""
    distillation = config.distillation
    if distillation is None:
        return policy_T
    coef = distillation.coef * (1.0 if batch.distill_scale is None else batch.distill_scale)
    if distillation.rl_weight:
        return distillation.rl_weight * policy_T + coef * gap_T
    return coef * bounded_exp(log_ratio(policies.logp_T, policies.old_T), config.log_ratio_clamp) * gap_T.detach()


def _given(value_T: Tensor | None, field: str, mask_T: Tensor) -> Tensor:
    if value_T is None:
        raise LossInputError(f"the loss settings need {field} and the batch has none")
    return _clean(value_T, mask_T)


def _clean(value_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, value_T, 0)


def _only(value_T: Tensor, keep_T: Tensor) -> Tensor:
    return torch.where(keep_T, value_T, 0)


def _sum(value_T: Tensor, mask_T: Tensor) -> Stat:
    return Stat(total=torch.where(mask_T, value_T.detach(), 0).sum(), count=mask_T.sum())
