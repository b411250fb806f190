"""Policy losses in AReaL's parametrisation, which is the project's own up to names."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from golden_case import Case, Fields, array, assert_close
from loss_cases import Layout, Outcome, compare, layout, maybe, number, optional, run_loss, weights_of
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import LossConfig
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import BehaviourWeight, Filter, admit
from stages.learning.losses.methods import Method
from stages.learning.losses.minibatch import m2po_cutoff
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.sapo import Sapo


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
            method=ppo_method(case.params), proximal="recompute", filters=(one,), behaviour_weight="token"
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
    config = LossConfig(method=ppo_method(params), proximal="recompute", filters=filters, behaviour_weight=weight)
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


def ppo_method(params: Fields) -> Method:
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
}
