"""SkyRL's policy losses as settings of the project's.

Its losses are sums over trained tokens (row weight 1), its rollout policy is the behaviour policy here and its old policy the proximal
one. Log ratios are clamped at ±20 (±10 for GSPO).
"""

from collections.abc import Callable

import torch
from golden_case import Case, Fields, array, assert_close
from loss_cases import Layout, Outcome, compare, layout, maybe, number, run_loss
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import LossConfig
from stages.learning.losses.dppo import Dppo
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import BehaviourWeight, Filter
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.proximal import Proximal
from stages.learning.losses.sapo import Sapo

CLAMP = 20.0
GSPO_CLAMP = 10.0


def skyrl_batch(case: Case, at: Layout) -> LossBatch:
    return LossBatch(
        rows=at.rows,
        loss_mask_T=at.mask(case.inputs["loss_mask"]),
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=at.floats(case.inputs["rollout_logprobs"]),
        prox_logp_T=at.floats(case.inputs["old_logprobs"]),
    )


def check_ppo(case: Case) -> None:
    params = case.params
    kind = params["policy_loss_type"]
    assert kind in {"regular", "dual_clip"}, kind
    dual = number(params, "clip_ratio_c") if kind == "dual_clip" else None
    params.without_effect("clip_ratio_c")  # the regular loss has no dual clip
    method = Ppo(**_clips(params), dual_clip=dual)
    filters, weight = correction(params.get("off_policy_correction"))
    config = LossConfig(
        method=method, proximal="recompute", filters=filters, behaviour_weight=weight, log_ratio_clamp=CLAMP
    )
    _check(case, config)


def check_gspo(case: Case) -> None:
    """Row ratio, token advantages, gradient through the token."""
    case.params.without_effect("policy_loss_type", "clip_ratio_c")
    method = Gspo(**_clips(case.params), advantage="token", gradient="token")
    filters, weight = correction(case.params.get("off_policy_correction"))
    _check(
        case,
        LossConfig(
            method=method, proximal="recompute", filters=filters, behaviour_weight=weight, log_ratio_clamp=GSPO_CLAMP
        ),
    )


def check_sapo(case: Case) -> None:
    taus = case.params["sapo"]
    assert isinstance(taus, Fields)
    _ignore_clips(case.params)
    method = Sapo(tau_pos=number(taus, "tau_pos"), tau_neg=number(taus, "tau_neg"))
    filters, weight = correction(case.params.get("off_policy_correction"))
    _check(
        case,
        LossConfig(
            method=method, proximal="recompute", filters=filters, behaviour_weight=weight, log_ratio_clamp=CLAMP
        ),
    )


def check_cispo(case: Case) -> None:
    given = case.params["cispo"]
    assert isinstance(given, Fields)
    _ignore_clips(case.params)
    anchors: dict[object, Proximal] = {"rollout": "none", "old": "recompute"}
    method = Cispo(eps_clip=number(given, "cispo_eps_clip_low"), eps_clip_higher=number(given, "cispo_eps_clip_high"))
    filters, weight = correction(case.params.get("off_policy_correction"))
    proximal = anchors[given["cispo_anchor"]]
    _check(
        case,
        LossConfig(method=method, proximal=proximal, filters=filters, behaviour_weight=weight, log_ratio_clamp=CLAMP),
    )


def check_dppo(case: Case) -> None:
    given = case.params["dppo"]
    assert isinstance(given, Fields)
    _ignore_clips(case.params)
    kind = given["dppo_type"]
    assert kind in {"binary_tv", "binary_kl"}, kind
    method = Dppo(
        divergence=str(kind), threshold_low=number(given, "delta_low"), threshold_high=number(given, "delta_high")
    )
    assert case.params.get("off_policy_correction") is None, (
        "DPPO has the rollout policy as its anchor: a correction would count twice"
    )
    _check(case, LossConfig(method=method, proximal="none", log_ratio_clamp=CLAMP))


def _clips(params: Fields) -> dict[str, float]:
    return {"eps_clip": number(params, "eps_clip_low"), "eps_clip_higher": number(params, "eps_clip_high")}


def _ignore_clips(params: Fields) -> None:
    """Settings of the PPO loss, given with every loss."""
    params.without_effect("policy_loss_type", "eps_clip_low", "eps_clip_high", "clip_ratio_c")


def correction(given: object) -> tuple[tuple[Filter, ...], BehaviourWeight]:
    """Its off-policy correction: weights capped from above, and masks by token ratio, by outlier tokens, by row ratio."""
    if given is None:
        return (), "none"
    assert isinstance(given, Fields)
    filters: list[Filter] = []
    weight: BehaviourWeight = "none"
    match given.get("tis_ratio_type"):
        case None:
            pass
        case "token":
            weight = "token"
            filters.append(Filter(action="clamp", upper=number(given, "token_tis_ratio_clip_high")))
        case "sequence":
            weight = "sequence_product"
            cap = number(given, "sequence_tis_ratio_clip_high")
            filters.append(Filter(level="sequence", action="clamp", aggregation="sum", upper=cap))
        case other:
            raise AssertionError(f"tis_ratio_type {other} is unknown")
    low, high = maybe(given, "outlier_token_is_threshold_low"), maybe(given, "outlier_token_is_threshold_high")
    if high is not None:
        filters.append(Filter(level="sequence", aggregation="max", upper=high))
    if low is not None:
        filters.append(Filter(level="sequence", aggregation="min", upper=None, lower=low))
    low, high = maybe(given, "token_mask_is_threshold_low"), maybe(given, "token_mask_is_threshold_high")
    if low is not None and high is not None:
        filters.append(Filter(upper=high, lower=low))
    return (*filters, *_row_mask(given)), weight


def _row_mask(given: Fields) -> tuple[Filter, ...]:
    match given.get("sequence_mask_metric"):
        case None:
            return ()
        case "geometric":
            low, high = number(given, "geo_mask_low"), number(given, "geo_mask_high")
            return (Filter(level="sequence", aggregation="mean", upper=high, lower=low),)
        case "product":
            low, high = number(given, "product_mask_low"), number(given, "product_mask_high")
            return (Filter(level="sequence", aggregation="sum", upper=high, lower=low),)
        case other:
            raise AssertionError(f"sequence_mask_metric {other} is unknown")


def _check(case: Case, config: LossConfig) -> None:
    case.params.without_effect("loss_reduction")  # folded into the advantages before the loss that these data hold
    at = layout(case)
    batch = skyrl_batch(case, at)
    outcome = run_loss(
        at, at.floats(case.inputs["logprobs"]), batch, config, torch.ones(at.rows.num_rows, dtype=at.dtype)
    )
    expected = case.expected
    kept = torch.as_tensor(array(expected["final_loss_mask"])).bool()
    assert torch.equal(at.back(outcome.terms.keep_T), kept)
    lost_R = at.rows.count(outcome.terms.mask_T & ~outcome.terms.keep_T) > 0
    if isinstance(config.method, Gspo) and lost_R.any():
        _check_whole_rows(case, outcome, at.rows.spread(~lost_R))
        return
    compare(
        case,
        outcome,
        loss=expected["loss"],
        grad=expected["grad_logprobs"],
        per_token=expected["per_token_loss"],
        where=outcome.terms.keep_T,
    )
    _check_metrics(case, outcome)


def _check_whole_rows(case: Case, outcome: Outcome, whole_T: Tensor) -> None:
    """Its row ratio is over all trained tokens, here over the kept ones: the same where a row lost none."""
    at, expected = outcome.at, case.expected
    where = at.back(whole_T & outcome.terms.mask_T)
    assert_close(outcome.per_token, expected["per_token_loss"], case, "token", "per-token loss", where=where)
    assert_close(outcome.grad, expected["grad_logprobs"], case, "gradient", "gradient", where=where)
    expected.without_effect("loss", "metrics")


def _check_metrics(case: Case, outcome: Outcome) -> None:
    metrics = case.expected["metrics"]
    assert isinstance(metrics, Fields)
    terms, rows = outcome.terms, outcome.at.rows
    mask_T = terms.mask_T
    ratio_T = terms.method.ratio_T[mask_T]
    raw_T = (terms.anchor_logp_T - terms.old_logp_T).clamp(-CLAMP, CLAMP).exp()[mask_T]
    found = {"clip_ratio": outcome.mean("clip_fraction"), "cispo/ratio_mean": float(ratio_T.mean())}
    if "cispo/ratio_max" in metrics:
        found |= {"cispo/ratio_max": float(ratio_T.max()), "cispo/ratio_min": float(ratio_T.min())}
    if "is_ratio_mean" in metrics:
        found |= {"is_ratio_mean": float(raw_T.mean()), "is_ratio_max": float(raw_T.max())}
    row_lost_R = rows.count(mask_T & ~terms.keep_T) > 0
    changed = float(terms.admission.changed_T.sum() / mask_T.sum())
    if "token_mask_ratio" in metrics:
        found["token_mask_ratio"] = changed
    elif "outlier_seq_masked_ratio" in metrics:
        found["outlier_seq_masked_ratio"] = float(row_lost_R.double().mean())
    elif "geo_sequence_mask_masked_ratio" in metrics:
        found["geo_sequence_mask_masked_ratio"] = float(row_lost_R.double().mean())
    elif "tis_token_clip_high_ratio" in metrics:
        found["tis_token_clip_high_ratio"] = changed
    for key, value in found.items():
        if key in metrics:
            assert_close(value, metrics[key], case, "metric", key)
    # What is left splits the same shares by side, or takes spreads over padding: its monitoring.
    metrics.without_effect(*metrics)


CHECKS: dict[str, Callable[[Case], None]] = {
    "skyrl_ppo": check_ppo,
    "skyrl_off_policy": check_ppo,
    "skyrl_gspo": check_gspo,
    "skyrl_sapo": check_sapo,
    "skyrl_cispo": check_cispo,
}
