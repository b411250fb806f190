"""Policy losses in AReaL's parametrisation, which is the project's own up to names."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from check_policy_losses_verl import verl_weights
from golden_case import Case, Fields, array, assert_close
from loss_cases import Layout, Outcome, compare, layout, maybe, number, optional, run_loss, weights_of
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import LossConfig
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import BehaviourWeight, Filter, admit
from stages.learning.losses.kl import KlEstimate, kl_estimate
from stages.learning.losses.methods import Method
from stages.learning.losses.minibatch import m2po_cutoff
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.proximal import approximation_errors
from stages.learning.losses.sapo import Sapo
from stages.learning.rows import Rows


def read_filter(given: Fields) -> Filter:
    """One rejection setting. Its `lower_effective` and `config_*` keys describe the reference's own defaults and refusals."""
    given.without_effect("config_valid", "config_error")
    if given.get("lower_effective") is not None:
        assert number(given, "lower_effective") == (maybe(given, "lower") or 0.0)
    fields = {
        "level": "level",
        "action": "action",
        "metric": "metric",
        "agg": "aggregation",
        "upper": "upper",
        "lower": "lower",
    }
    return msgspec.convert({ours: given[theirs] for theirs, ours in fields.items() if theirs in given}, Filter)


def read_correction(given: Fields | None) -> tuple[tuple[Filter, ...], BehaviourWeight]:
    """AReaL weighs by the ratio wherever it filters: the row's geometric mean for a row-level ratio, else the token's."""
    if given is None:
        return (), "none"
    one = read_filter(given)
    by_row = one.metric == "ratio" and one.level == "sequence"
    return (one,), "sequence_geometric" if by_row else "token"


def refused(given: Fields | None) -> bool:
    """A clamp by a divergence: the reference's function runs it, its config and this project refuse it."""
    return given is not None and given["action"] == "clamp" and given["metric"] != "ratio"


def check_refusal(case: Case, given: Fields) -> None:
    """The settings are refused here. What the reference shares with the same bound as a mask: which rows are outside, and everything
    about the tokens inside. (At token level it limits the ratio itself to the bounds of a divergence: nothing is shared.)
    """
    with pytest.raises((LossConfigError, msgspec.ValidationError), match="action"):
        read_filter(given)
    if given["level"] == "sequence":
        _check_inside(case, _as_mask(given))
    for fields in (case.params, case.inputs, case.expected):
        fields.without_effect(*fields)


def _as_mask(given: Fields) -> Filter:
    named = {"level": "level", "metric": "metric", "agg": "aggregation", "upper": "upper", "lower": "lower"}
    return msgspec.convert({"action": "mask"} | {ours: given[theirs] for theirs, ours in named.items()}, Filter)


def _check_inside(case: Case, one: Filter) -> None:
    at, expected = layout(case), case.expected
    if case.kind == "rejection":
        mask_T = at.mask(case.inputs["loss_mask"])
        prox_T, old_T = at.floats(case.inputs["proximal_logprobs"]), at.floats(case.inputs["old_logprobs"])
        found = admit(prox_T, old_T, mask_T, at.rows, filters=(one,), weight="token")
        stats = expected
    else:
        config = LossConfig(
            method=_ppo_method(case.params), proximal="recompute", filters=(one,), behaviour_weight="token"
        )
        batch = areal_batch(case, at)
        outcome = run_loss(at, at.floats(case.inputs["logprobs"]), batch, config, areal_weights(case, at, batch))
        found, mask_T = outcome.terms.admission, batch.loss_mask_T
        inside = at.back(found.keep_T)
        assert_close(outcome.per_token, expected["per_token_loss"], case, "token", "per-token loss", where=inside)
        assert_close(outcome.grad, expected["grad_logprobs"], case, "gradient", "gradient", where=inside)
        stats = expected["stats"]
        assert isinstance(stats, Fields)
    where = at.back(found.keep_T)
    assert_close(at.back(found.weight_T), stats["behave_imp_weight"], case, "token", "weight", where=where)
    share = float(found.changed_T.sum()) / max(int(mask_T.sum()), 1)
    assert_close(share, stats["filtered_fraction"], case, "metric", "share of tokens outside")


def areal_batch(case: Case, at: Layout, *, narrowed_T: Tensor | None = None) -> LossBatch:
    denominator = case.inputs.get("denominator_mask")
    mask_T = at.mask(case.inputs["loss_mask"])
    if denominator is not None:
        narrowed_T, mask_T = mask_T, at.mask(denominator)
    return LossBatch(
        rows=at.rows,
        loss_mask_T=mask_T,
        narrowed_T=narrowed_T,
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=at.floats(case.inputs["old_logprobs"]),
        prox_logp_T=optional(case, at, "proximal_logprobs"),
    )


def areal_weights(case: Case, at: Layout, batch: LossBatch) -> Tensor:
    return weights_of(
        at,
        batch.loss_mask_T,
        case.params["loss_aggregation"],
        divisor=maybe(case.params, "loss_aggregation_divisor"),
        group_sizes=case.inputs.get("group_sizes"),
    )


def check_ppo(case: Case) -> None:
    params = case.params
    rejection = params.get("rejection_sampling")
    assert rejection is None or isinstance(rejection, Fields)
    if rejection is not None and refused(rejection):
        check_refusal(case, rejection)
        return
    filters, weight = read_correction(rejection)
    config = LossConfig(method=_ppo_method(params), proximal="recompute", filters=filters, behaviour_weight=weight)
    if case.defect:
        _check_certain_tokens_stay(case, config)
        return
    _check_areal(case, config)


def _check_certain_tokens_stay(case: Case, config: LossConfig) -> None:
    """The reference's only defect here: a binary KL that is not a number for tokens which both policies are certain of."""
    assert [one.metric for one in config.filters] == ["binary_kl"], f"unknown defect: {case.note}"
    at = layout(case)
    batch = areal_batch(case, at)
    outcome = run_loss(at, at.floats(case.inputs["logprobs"]), batch, config, areal_weights(case, at, batch))
    certain_T = _certain(case, at, outcome.terms.mask_T)
    assert bool(outcome.terms.keep_T[certain_T].all())
    assert np.isfinite(outcome.loss)
    assert bool(outcome.grad.isfinite().all())


def _certain(case: Case, at: Layout, mask_T: Tensor) -> Tensor:
    """Trained tokens of probability 1 (in float32) under both policies."""
    prox_T, old_T = at.floats(case.inputs["proximal_logprobs"]), at.floats(case.inputs["old_logprobs"])
    return mask_T & (prox_T.float().exp() == 1) & (old_T.float().exp() == 1)


def _ppo_method(params: Fields) -> Method:
    clip = {"eps_clip": number(params, "eps_clip"), "eps_clip_higher": maybe(params, "eps_clip_higher")}
    level = params["importance_sampling_level"]
    assert level in {"token", "sequence"}, level
    make = Ppo if level == "token" else Gspo
    return make(**clip, dual_clip=maybe(params, "c_clip"))


def check_sapo(case: Case) -> None:
    level = case.params["importance_sampling_level"]
    method = Sapo(tau_pos=number(case.params, "tau_pos"), tau_neg=number(case.params, "tau_neg"), level=str(level))
    _check_areal(case, LossConfig(method=method, proximal="none"))


def check_cispo(case: Case) -> None:
    rejection = case.params.get("rejection_sampling")
    assert rejection is None or isinstance(rejection, Fields)
    filters, weight = read_correction(rejection)
    method = Cispo(eps_clip=number(case.params, "eps_clip"), eps_clip_higher=number(case.params, "eps_clip_higher"))
    config = LossConfig(method=method, proximal="recompute", filters=filters, behaviour_weight=weight)
    _check_areal(case, config, clip_after_rejection=True)


def _check_areal(case: Case, config: LossConfig, *, clip_after_rejection: bool = False) -> None:
    at, expected = layout(case), case.expected
    batch = areal_batch(case, at)
    outcome = run_loss(at, at.floats(case.inputs["logprobs"]), batch, config, areal_weights(case, at, batch))
    looked_at_T = batch.loss_mask_T if batch.narrowed_T is None else batch.narrowed_T
    compare(
        case,
        outcome,
        loss=expected["loss"],
        grad=expected["grad_logprobs"],
        per_token=expected["per_token_loss"],
        where=looked_at_T,
    )
    by_row = isinstance(config.method, Gspo)
    found = _token_stats(outcome, looked_at_T, clip_after_rejection=clip_after_rejection, by_row=by_row)
    _check_token_stats(case, outcome, looked_at_T, found)
    means = expected["stat_means"]
    assert isinstance(means, Fields)
    named = {
        "clip_ratio": "clip_mask",
        "dual_clip_ratio": "dual_clip_mask",
        "importance_weight_mean": "importance_weight",
        "approx_kl_mean": "approx_kl",
    }
    for key in means:
        value = found[named[key]][looked_at_T].double().mean() if looked_at_T.any() else torch.zeros(())
        assert_close(float(value), means[key], case, "metric", key)


def _token_stats(
    outcome: Outcome, looked_at_T: Tensor, *, clip_after_rejection: bool, by_row: bool
) -> dict[str, Tensor]:
    terms, method = outcome.terms, outcome.terms.method
    counted_T = terms.keep_T if clip_after_rejection or by_row else looked_at_T
    nothing_T = torch.zeros_like(looked_at_T)
    dual_T = nothing_T if method.dual_clipped_T is None else method.dual_clipped_T
    extra = method.extra or {}
    # The reference's row ratio exists on the tokens that it was averaged over only.
    ratio_T = method.ratio_T * terms.keep_T if by_row else method.ratio_T
    found = {
        "importance_weight": ratio_T,
        "approx_kl": terms.logp_T - terms.anchor_logp_T,
        "clip_mask": method.clipped_T & counted_T,
        "dual_clip_mask": dual_T & counted_T,
        "behave_approx_kl": (terms.anchor_logp_T - terms.old_logp_T) * terms.keep_T,
        "behave_imp_weight": terms.admission.weight_T,
        "behave_mask": terms.keep_T,
    }
    renamed = {
        "sapo_soft_gate": "sapo_gate",
        "sapo_scaled_gate_pos": "sapo_gate_pos",
        "sapo_scaled_gate_neg": "sapo_gate_neg",
    }
    return found | {theirs: extra[ours] for theirs, ours in renamed.items() if ours in extra}


def _check_token_stats(case: Case, outcome: Outcome, looked_at_T: Tensor, found: dict[str, Tensor]) -> None:
    stats = case.expected["stats"]
    assert isinstance(stats, Fields)
    total, valid = looked_at_T.numel(), int(looked_at_T.sum())
    counts = {
        "n_total_tokens": total,
        "n_valid_tokens": valid,
        "n_masked_tokens": total - valid,
        "masked_token_ratio": (total - valid) / total,
        "filtered_fraction": float((outcome.terms.admission.changed_T & looked_at_T).sum()) / max(valid, 1),
    }
    for key in stats:
        if key in counts:
            assert_close(counts[key], stats[key], case, "metric", key)
        else:
            got = outcome.at.back(found[key].to(outcome.at.dtype))
            assert_close(got, stats[key], case, "token", key, where=outcome.at.back(looked_at_T))


def check_rejection(case: Case) -> None:
    if refused(case.params):
        check_refusal(case, case.params)
        return
    (one,), weight = read_correction(case.params)
    at = layout(case)
    mask_T = at.mask(case.inputs["loss_mask"])
    found = admit(
        at.floats(case.inputs["proximal_logprobs"]),
        at.floats(case.inputs["old_logprobs"]),
        mask_T,
        at.rows,
        filters=(one,),
        weight=weight,
    )
    if case.defect:
        assert one.metric == "binary_kl", f"unknown defect: {case.note}"
        certain_T = _certain(case, at, mask_T)
        assert bool(found.keep_T[certain_T].all())
        return
    infinite_T = _infinite_ratios(case, at, mask_T, one)
    same = at.back(~infinite_T)
    want_mask = torch.as_tensor(array(case.expected["loss_mask"])).bool()
    assert torch.equal(at.back(found.keep_T)[same], want_mask[same])
    assert_close(
        at.back(found.weight_T),
        case.expected["behave_imp_weight"],
        case,
        "token",
        "weight",
        where=at.back(mask_T) & same,
    )
    if not infinite_T.any():
        share = float(found.changed_T.sum()) / max(int(mask_T.sum()), 1)
        assert_close(share, case.expected["filtered_fraction"], case, "metric", "filtered fraction")
    else:
        case.expected.without_effect("filtered_fraction")
        assert bool(found.changed_T[infinite_T].all())


def _infinite_ratios(case: Case, at: Layout, mask_T: Tensor, one: Filter) -> Tensor:
    """Trained tokens that a single infinite log-prob decides: the reference reads their ratio as 1, here it stays infinite or 0."""
    prox_T, old_T = at.floats(case.inputs["proximal_logprobs"]), at.floats(case.inputs["old_logprobs"])
    infinite_T = mask_T & (prox_T - old_T).isinf()
    if one.metric != "ratio" or one.level == "token":
        return infinite_T if one.metric == "ratio" else torch.zeros_like(infinite_T)
    return mask_T & at.rows.spread(at.rows.count(infinite_T) > 0)


def check_m2po_mask(case: Case) -> None:
    at = layout(case)
    mask_T = at.mask(case.inputs["loss_mask"])
    moment_T = (at.floats(case.inputs["old_logprobs"]) - at.floats(case.inputs["proximal_logprobs"])).square()
    kept_T = mask_T & (moment_T <= m2po_cutoff(moment_T[mask_T], number(case.params, "m2_threshold")))
    want_T = at.mask(case.expected["loss_mask"])
    # Tokens of equal value stay together here; the reference cuts through them in the order of its sort.
    apart_T = kept_T ^ want_T
    if apart_T.any():
        tied = moment_T[apart_T].unique()
        assert len(tied) == 1
        assert int((moment_T[mask_T] == tied).sum()) > int(apart_T.sum())
    assert int((mask_T & ~want_T).sum()) == case.expected["n_masked"]


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
        method = _ppo_method(params)
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
    given_prox_T = optional(case, at, "proximal_logprobs")
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
        "prox_logp_gt": terms.anchor_logp_T if given_prox_T is None else given_prox_T,
        "sapo_soft_gate": extra.get("sapo_gate"),
        "sapo_scaled_gate_pos": extra.get("sapo_gate_pos"),
        "sapo_scaled_gate_neg": extra.get("sapo_gate_neg"),
    }
    values |= _approximations(case, outcome, at)
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


def _approximations(case: Case, outcome: Outcome, at: Layout) -> dict[str, Tensor]:
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
        errors = approximation_errors(
            terms.anchor_logp_T, new_T, old_T, one_T, versions_T=versions_T, current_version=current
        )
        for key, stat in errors.items():
            found.setdefault(key, torch.zeros_like(new_T))[position] = stat.mean()
    return found


def _staleness(case: Case, outcome: Outcome) -> dict[str, float]:
    if case.inputs.get("versions") is None or case.params.get("current_version") is None:
        return {}
    current = int(number(case.params, "current_version"))
    versions = outcome.at.ints(case.inputs["versions"])[outcome.terms.keep_T]
    versions = versions[versions >= 0].double()
    found: dict[str, float] = {"v_theta": current, "v_proximal": current - 1, "n_valid_generated_tokens": len(versions)}
    for name, reference in {"theta": current, "proximal": current - 1}.items():
        stale = reference - versions
        found |= {
            f"sample_staleness_{name}_{key}": float(value)
            for key, value in {"avg": stale.mean(), "max": stale.max(), "min": stale.min()}.items()
        }
    return found


def _check_reported_scalars(case: Case, outcome: Outcome) -> None:
    terms = outcome.terms
    narrowed_T = _narrowed(outcome)
    dropped = int((narrowed_T & ~terms.keep_T).sum())
    total, valid = narrowed_T.numel(), int(narrowed_T.sum())
    found = {
        "n_total_tokens": total,
        "n_valid_tokens_in_loss": valid,
        "n_masked_tokens": total - valid,
        "masked_token_ratio": (total - valid) / total,
        "rs_filtered_fraction": dropped / max(valid, 1),
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


def check_error(case: Case) -> None:
    if case.defect:
        weights = verl_weights(case)
        assert float(weights.abs().sum()) == 0.0
        return
    assert case.expected["error"]
    params, inputs = case.params, case.inputs
    if "old_logprobs" in inputs:
        _check_rows_are_required(case)
    elif "rollout_is" in params:
        with pytest.raises((AssertionError, ValueError)):
            verl_weights(case)
    elif _offered_here(params):
        _build(params)
    else:
        with pytest.raises((LossConfigError, msgspec.ValidationError)):
            _build(params)


def _offered_here(params: Fields) -> bool:
    """Settings that the reference refuses by choice and this project has: binary KL, and SAPO against a proximal policy."""
    alone = params.get("use_sapo_loss") and not params.get("use_cispo_loss")
    return (params.get("metric") == "binary_kl" and params.get("action") != "clamp") or bool(
        alone and params.get("use_decoupled_loss")
    )


def _build(params: Fields) -> object:
    """The settings of a case without data, as this project would be given them."""
    params.without_effect("use_decoupled_loss")
    if "metric" in params or "level" in params:
        given = {"agg" if key == "aggregation" else key: params[key] for key in params if params.get(key) is not None}
        given["aggregation"] = given.pop("agg", "mean")
        return msgspec.convert({"upper": 2.0} | given, Filter)
    flags = {"cispo": params.get("use_cispo_loss"), "sapo": params.get("use_sapo_loss")}
    kinds = [kind for kind, wanted in flags.items() if wanted]
    if not kinds:
        bare_cispo = "eps_clip_higher" in params and "c_clip" not in params
        kinds = ["sapo" if "tau_pos" in params else "cispo" if bare_cispo else "ppo"]
    fields: dict[str, object] = {}
    for kind in kinds:  # two methods: the settings of both, which no method takes
        fields |= {"kind": kind, **_fields(params, kind)}
    params.without_effect(*params)
    return msgspec.convert({"method": fields}, LossConfig)


def _fields(params: Fields, kind: str) -> dict[str, object]:
    renamed = {
        "c_clip": "dual_clip",
        "importance_sampling_level": "level",
        "sapo_tau_pos": "tau_pos",
        "sapo_tau_neg": "tau_neg",
    }
    found = {renamed.get(key, key): params[key] for key in params if not key.startswith("use_")}
    if kind == "sapo":
        return {"tau_pos": 1.0, "tau_neg": 1.05} | {
            key: found[key] for key in ("tau_pos", "tau_neg", "level") if key in found
        }
    # A cap of None is the error in question; other values that are not given stay away.
    return {
        key: value
        for key, value in found.items()
        if value is not None or (kind == "cispo" and key == "eps_clip_higher")
    }


def _check_rows_are_required(case: Case) -> None:
    """Row-level settings can't run without rows here: a batch has them by construction."""
    level = case.params.get("level") or case.params.get("importance_sampling_level")
    assert level == "sequence", level
    case.params.without_effect(*case.params)
    case.inputs.without_effect(*case.inputs)
    at = layout(case)
    mask_T = at.mask(case.inputs["loss_mask"])
    logp_T = at.floats(case.inputs["old_logprobs"])
    with pytest.raises(TypeError, match="rows"):
        admit(logp_T, logp_T, mask_T, filters=(), weight="none")
    with pytest.raises(TypeError, match="num_rows"):
        Rows(row_T=mask_T.long())


CHECKS: dict[str, Callable[[Case], None]] = {
    "ppo": check_ppo,
    "dual_clip": check_ppo,
    "ppo_aggregation": check_ppo,
    "decoupled": check_ppo,
    "rejection_ppo": check_ppo,
    "gspo": check_ppo,
    "sapo": check_sapo,
    "cispo": check_cispo,
    "rejection": check_rejection,
    "m2po_mask": check_m2po_mask,
    "grpo_end_to_end": check_end_to_end,
    "error": check_error,
}
