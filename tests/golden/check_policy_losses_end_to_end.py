"""AReaL's whole actor loss with everything that it reports, from the project's terms."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch
from check_policy_losses import areal_batch, areal_weights, ppo_method, read_correction
from check_prox_logp import staleness
from golden_case import Case, Fields, assert_close
from loss_cases import Layout, Outcome, compare, layout, maybe, number, optional, run_loss
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import LossConfig
from stages.learning.losses.kl import KlEstimate, kl_estimate
from stages.learning.losses.methods import Method
from stages.learning.losses.proximal import approximation_errors
from stages.learning.losses.sapo import Sapo


def check_end_to_end(case: Case) -> None:
    params = case.params
    at = layout(case)
    batch = areal_batch(case, at)
    config = _end_to_end_config(params)
    if case.inputs.get("versions") is not None:
        batch = _with_versions(case, at, batch)
    outcome = run_loss(at, at.floats(case.inputs["logprobs"]), batch, config, areal_weights(case, at, batch))
    expected = case.expected
    # Tokens that the mini-batch's mask dropped have no loss here; the reference leaves junk there for SAPO and CISPO.
    compare(
        case,
        outcome,
        loss=expected["loss"],
        grad=expected["grad_logprobs"],
        per_token=expected["per_token_loss"],
        where=outcome.terms.keep_T,
    )
    _check_reported(case, outcome, at)


def _with_versions(case: Case, at: Layout, batch: LossBatch) -> LossBatch:
    version = case.params.get("current_version")
    return replace(
        batch,
        versions_T=at.ints(case.inputs["versions"]),
        current_version=None if version is None else int(number(case.params, "current_version")),
    )


def _end_to_end_config(params: Fields) -> LossConfig:
    rejection = params.get("rejection_sampling")
    assert rejection is None or isinstance(rejection, Fields)
    filters, weight = read_correction(rejection)
    clip = {"eps_clip": number(params, "eps_clip"), "eps_clip_higher": maybe(params, "eps_clip_higher")}
    assert not (params["use_cispo_loss"] and params["use_sapo_loss"])
    if params["use_cispo_loss"]:
        params.without_effect("importance_sampling_level", "c_clip")
        method: Method = Cispo(**clip)
    elif params["use_sapo_loss"]:
        params.without_effect("c_clip")
        level = str(params["importance_sampling_level"])
        method = Sapo(tau_pos=number(params, "sapo_tau_pos"), tau_neg=number(params, "sapo_tau_neg"), level=level)
    else:
        method = ppo_method(params)
    threshold = maybe(params, "m2_threshold")
    decoupled = bool(params["use_decoupled_loss"])
    # "metrics" recomputes, and reports the approximations beside it.
    names = {"metrics": "recompute", "reuse_train_logp": "reuse_train"}
    given = str(params["prox_logp_method"])
    # SAPO is measured from the behaviour policy; the others get whatever proximal policy they are given.
    sapo = bool(params["use_sapo_loss"])
    assert not (sapo and decoupled)
    proximal = "none" if sapo else names.get(given, given)
    return msgspec.convert(
        {
            "method": msgspec.to_builtins(method),
            "proximal": proximal,
            "filters": msgspec.to_builtins(filters),
            "behaviour_weight": weight,
            "m2po_threshold": threshold,
        },
        LossConfig,
    )


def _check_reported(case: Case, outcome: Outcome, at: Layout) -> None:
    terms, method = outcome.terms, outcome.terms.method
    narrowed_T = _narrowed(outcome)
    keep_T, clipped_T = terms.keep_T, narrowed_T & method.clipped_T
    entropy_T = at.floats(case.inputs["entropy"])
    prox_T = _proximal(case, outcome, at)
    extra = method.extra or {}
    dual_T = torch.zeros_like(keep_T) if method.dual_clipped_T is None else method.dual_clipped_T
    values = {
        "importance_weight": method.ratio_T,
        "approx_kl": terms.logp_T - terms.anchor_logp_T,
        "new_logp": terms.logp_T,
        "old_logp": terms.old_logp_T,
        "entropy": entropy_T,
        "actor_loss": terms.loss_T,
        "clip_ratio": method.clipped_T,
        "dual_clip_ratio": dual_T,
        "logp_diff": terms.old_logp_T - terms.logp_T,
        "logp_abs_diff": (terms.old_logp_T - terms.logp_T).abs(),
        "behave_imp_weight": terms.weight_T,
        "behave_approx_kl": terms.anchor_logp_T - terms.old_logp_T,
        "behave_filtered_ratio": terms.admission.changed_T,
        "clipped_new_logp": terms.logp_T,
        "clipped_old_logp": terms.old_logp_T,
        "prox_logp_gt": prox_T,
        "sapo_soft_gate": extra.get("sapo_gate"),
        "sapo_scaled_gate_pos": extra.get("sapo_gate_pos"),
        "sapo_scaled_gate_neg": extra.get("sapo_gate_neg"),
    }
    values |= _approximations(case, outcome, at, prox_T)
    denominators = {"n_valid_tokens": keep_T, "clipped_tokens": clipped_T, "unclipped_behave_tokens": keep_T}
    means = case.expected["reported_means"]
    assert isinstance(means, Fields)
    for key in means:
        one, value_T = means[key], values[key]
        assert isinstance(one, Fields)
        assert value_T is not None
        where_T = denominators[str(one["denominator"])]
        assert int(where_T.sum()) == one["count"], key
        if one.get("mean") is not None:
            assert_close(float(value_T.detach()[where_T].double().mean()), one["mean"], case, "metric", key)
    _check_reported_scalars(case, outcome)


def _proximal(case: Case, outcome: Outcome, at: Layout) -> Tensor:
    """The proximal policy that is reported: the given one, unless the training pass itself takes its place."""
    given_T = optional(case, at, "proximal_logprobs")
    reused = case.params["prox_logp_method"] == "reuse_train_logp"
    return outcome.terms.logp_T if reused else outcome.terms.anchor_logp_T if given_T is None else given_T


def _approximations(case: Case, outcome: Outcome, at: Layout, prox_T: Tensor) -> dict[str, Tensor]:
    """Reported beside the loss where versions are given: what approximations of the proximal policy would have been, and the drift."""
    terms = outcome.terms
    new_T, old_T = terms.logp_T, terms.old_logp_T
    found = {
        "kl_div_direct": kl_estimate(old_T, new_T, KlEstimate(estimator="k1")),
        "kl_div_taylor": kl_estimate(new_T, old_T, KlEstimate(estimator="k2")),
        "kl_div_dual": kl_estimate(old_T, new_T, KlEstimate(estimator="k3")),
    }
    if case.inputs.get("versions") is None or case.params.get("current_version") is None:
        return found
    versions_T, current = at.ints(case.inputs["versions"]), int(number(case.params, "current_version"))
    for position in terms.keep_T.nonzero().squeeze(-1).tolist():
        one_T = torch.zeros_like(terms.keep_T)
        one_T[position] = True
        errors = approximation_errors(prox_T, new_T, old_T, one_T, versions_T=versions_T, current_version=current)
        for key, stat in errors.items():
            found.setdefault(key, torch.zeros_like(new_T))[position] = stat.mean()
    return found


def _staleness(case: Case, outcome: Outcome) -> dict[str, float]:
    if case.inputs.get("versions") is None or case.params.get("current_version") is None:
        return {}
    versions_T = outcome.at.ints(case.inputs["versions"])
    return staleness(versions_T, outcome.terms.keep_T, int(number(case.params, "current_version")))


def _check_reported_scalars(case: Case, outcome: Outcome) -> None:
    terms = outcome.terms
    narrowed_T = _narrowed(outcome)
    changed = int((narrowed_T & terms.admission.changed_T).sum())
    total, valid = narrowed_T.numel(), int(narrowed_T.sum())
    found = {
        "n_total_tokens": total,
        "n_valid_tokens_in_loss": valid,
        "n_masked_tokens": total - valid,
        "masked_token_ratio": (total - valid) / total,
        "rs_filtered_fraction": changed / max(valid, 1),
        **_staleness(case, outcome),
    }
    scalars = case.expected["reported_scalars"]
    assert isinstance(scalars, Fields)
    for key in scalars:
        assert_close(found[key], scalars[key], case, "metric", key)


def _narrowed(outcome: Outcome) -> Tensor:
    """The trained tokens that the mini-batch's rule (M2PO) left, before any filter."""
    narrowed_T = outcome.narrowed
    return outcome.terms.mask_T if narrowed_T is None else narrowed_T


CHECKS: dict[str, Callable[[Case], None]] = {"grpo_end_to_end": check_end_to_end}
