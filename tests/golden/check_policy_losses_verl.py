"""verl's policy losses, rollout weights and rollout rejection, as settings of the project's.

Its old policy is the proximal one here, its rollout policy the behaviour policy. Log ratios are clamped at ±20 there (±10 for
GSPO). Metrics are compared where they are statistics of what a loss hands out; the monitoring of its weights is its own.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from golden_case import Case, Fields, array, assert_close
from loss_cases import Layout, Outcome, compare, layout, maybe, number, optional, run_loss, weights_of
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import LossConfig
from stages.learning.losses.dppo import Dppo
from stages.learning.losses.dro import Dro
from stages.learning.losses.gmpo import Gmpo
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import Filter, Metric, RowAggregation, admit
from stages.learning.losses.kl_cov import KlCov
from stages.learning.losses.methods import Method
from stages.learning.losses.minibatch import only_rank, prepare_minibatch
from stages.learning.losses.policy import policy_terms
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.reinforce import Reinforce
from stages.learning.losses.sapo import Sapo

CLAMP = 20.0
GSPO_CLAMP = 10.0
DEFAULT_DUAL_CLIP = 3.0


def verl_batch(case: Case, at: Layout) -> LossBatch:
    old_T = at.floats(case.inputs["old_logprobs"])
    return LossBatch(
        rows=at.rows,
        loss_mask_T=at.mask(case.inputs["loss_mask"]),
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=old_T,
        prox_logp_T=old_T,
        importance_weight_T=optional(case, at, "rollout_is_weights"),
    )


def verl_row_weights(at: Layout, mask_T: Tensor, mode: object) -> Tensor:
    match mode:
        case "token-mean":
            return weights_of(at, mask_T, "token_mean")
        case "seq-mean-token-mean":  # the reference adds 1e-8 to each row's token count
            counts_R = at.rows.count(mask_T).to(at.dtype)
            return weights_of(at, mask_T, "seq_mean") * counts_R / (counts_R + 1e-8)
        case "seq-mean-token-sum":
            return weights_of(at, mask_T, "constant", divisor=1.0)
        case "seq-mean-token-sum-norm":
            return weights_of(at, mask_T, "constant", divisor=float(at.shape[-1]))
        case _:
            raise AssertionError(f"aggregation {mode} is unknown")


def clips(params: Fields) -> dict[str, float]:
    """Its lower and upper clip, each falling back on the symmetric one."""
    both = maybe(params, "clip_ratio")
    low, high = maybe(params, "clip_ratio_low"), maybe(params, "clip_ratio_high")
    found = {"eps_clip": both if low is None else low, "eps_clip_higher": both if high is None else high}
    assert None not in found.values(), params
    return {key: value for key, value in found.items() if value is not None}


def check_ppo(case: Case) -> None:
    dual = maybe(case.params, "clip_ratio_c")
    method = Ppo(**clips(case.params), dual_clip=DEFAULT_DUAL_CLIP if dual is None else dual)
    _check(case, method, mode=case.params["loss_agg_mode"], drop="pg_clipfrac")


def check_gspo(case: Case) -> None:
    """Row ratio, token advantages, gradient through the token; always the mean over rows of token means."""
    case.params.without_effect("loss_agg_mode")
    method = Gspo(**clips(case.params), advantage="token", gradient="token")
    _check(case, method, mode="seq-mean-token-mean", clamp=GSPO_CLAMP, drop="pg_clipfrac")


def check_sapo(case: Case) -> None:
    case.params.without_effect("loss_agg_mode")
    method = Sapo(tau_pos=number(case.params, "tau_pos"), tau_neg=number(case.params, "tau_neg"))
    _check(case, method, mode="seq-mean-token-mean", drop="pg_clipfrac")


def check_cispo(case: Case) -> None:
    _check(case, Cispo(**clips(case.params)), mode=case.params["loss_agg_mode"], drop="pg_clipfrac")


def check_dppo(case: Case, divergence: str) -> None:
    """Its value is −A·sg(r)·log π, ours −A·r: same gradient, another value where they are not on policy."""
    bounds = clips(case.params)
    method = Dppo(
        divergence="binary_tv" if divergence == "tv" else "binary_kl",
        threshold_low=bounds["eps_clip"],
        threshold_high=bounds["eps_clip_higher"],
        ratio_cap=number(case.params, "clip_ratio_c"),
    )
    at = layout(case)
    batch = verl_batch(case, at)
    config = LossConfig(method=method, proximal="recompute", log_ratio_clamp=CLAMP)
    weight_R = verl_row_weights(at, batch.loss_mask_T, case.params["loss_agg_mode"])
    logp_T = at.floats(case.inputs["logprobs"])
    outcome = run_loss(at, logp_T, batch, config, weight_R)
    assert_close(outcome.grad, case.expected["grad_logprobs"], case, "gradient", "gradient")
    # Their value from ours: ratio times log-prob in place of the ratio.
    theirs_T = outcome.at.floats(outcome.per_token.numpy()) * logp_T
    assert_close(
        at.back(theirs_T), case.expected["per_token_loss"], case, "token", "per-token", where=at.back(batch.loss_mask_T)
    )
    assert_close(
        float((at.rows.spread(weight_R) * theirs_T)[batch.loss_mask_T].sum()),
        case.expected["loss"],
        case,
        "loss",
        "loss",
    )
    _check_metrics(case, outcome, drop="pg_clipfrac")


def check_other(case: Case) -> None:
    """Losses that other references don't have; the data name the function that they came from."""
    function = case.source.rpartition("compute_policy_loss_")[2]
    match function:
        case "dro":
            _check(case, Dro(beta=number(case.params, "dro_beta")), mode=case.params["loss_agg_mode"], clamp=None)
        case "kl_cov":
            _check_kl_cov(case)
        case "geo_mean":
            _check_geo_mean(case)
        case "gpg" | "reinforce":
            case.params.without_effect("clip_ratio")
            _check(case, Reinforce(), mode=case.params["loss_agg_mode"], clamp=None)
        case _:
            raise AssertionError(f"{function} is unknown")


def _check_kl_cov(case: Case) -> None:
    """It picks tokens by the current log-probs; here by those that the mini-batch starts from, so those are given as them."""
    params = case.params
    params.without_effect("clip_ratio")  # it has no clip
    at = layout(case)
    batch = verl_batch(case, at)
    method = KlCov(fraction=number(params, "kl_cov_ratio"), coef=number(params, "ppo_kl_coef"))
    config = LossConfig(method=method, proximal="recompute")
    logp_T = at.floats(case.inputs["logprobs"])
    picked = prepare_minibatch([replace(batch, prox_logp_T=logp_T)], config, only_rank)[0].selected_T
    ready = replace(batch, selected_T=picked)
    leaf_T = logp_T.clone().requires_grad_()
    terms = policy_terms(leaf_T, ready, config)
    weight_R = verl_row_weights(at, batch.loss_mask_T, params["loss_agg_mode"])
    loss = (at.rows.spread(weight_R) * terms.loss_T).sum()
    loss.backward()
    assert leaf_T.grad is not None
    assert_close(float(loss.detach()), case.expected["loss"], case, "loss", "loss")
    assert_close(at.back(leaf_T.grad), case.expected["grad_logprobs"], case, "gradient", "gradient")
    assert_close(
        at.back(terms.loss_T), case.expected["per_token_loss"], case, "token", "token", where=at.back(batch.loss_mask_T)
    )
    metrics = _metrics(case)
    drift = (terms.logp_T - terms.anchor_logp_T).abs()[batch.loss_mask_T].mean()
    assert_close(float(drift), metrics["actor/ppo_kl"], case, "metric", "ppo_kl")


def _check_geo_mean(case: Case) -> None:
    """GMPO; the mean is over all rows there, empty ones included, over active ones here: the row weights say which."""
    case.params.without_effect("loss_agg_mode")
    at = layout(case)
    batch = verl_batch(case, at)
    if batch.importance_weight_T is not None:
        row_R = at.rows.mean((batch.importance_weight_T + 1e-10).log(), batch.loss_mask_T).exp()
        batch = replace(batch, importance_weight_T=at.rows.spread(row_R))
    bounds = clips(case.params)
    weight_R = weights_of(at, batch.loss_mask_T, "seq_mean") * _active_share(at, batch.loss_mask_T)
    config = LossConfig(method=Gmpo(**bounds), proximal="recompute")
    outcome = run_loss(at, at.floats(case.inputs["logprobs"]), batch, config, weight_R)
    # Its means divide by the token count + 1e-8: inside the tolerance.
    compare(case, outcome, loss=case.expected["loss"], grad=case.expected["grad_logprobs"])
    metrics = _metrics(case)
    clipped_T, mask_T = outcome.terms.method.clipped_T, batch.loss_mask_T
    shares = {"actor/pg_clipfrac": batch.advantages_T > 0, "actor/pg_clipfrac_lower": batch.advantages_T < 0}
    for key in metrics:
        if key in shares:
            share = (clipped_T & shares[key] & mask_T).sum() / mask_T.sum()
            assert_close(float(share), metrics[key], case, "metric", key)
        else:
            _check_kl_metric(case, outcome, metrics, key)


def _active_share(at: Layout, mask_T: Tensor) -> float:
    return float((at.rows.count(mask_T) > 0).double().mean())


def _check(case: Case, method: Method, *, mode: object, clamp: float | None = CLAMP, drop: str | None = None) -> None:
    at = layout(case)
    batch = verl_batch(case, at)
    config = LossConfig(method=method, proximal="recompute", log_ratio_clamp=clamp)
    weight_R = verl_row_weights(at, batch.loss_mask_T, mode)
    outcome = run_loss(at, at.floats(case.inputs["logprobs"]), batch, config, weight_R)
    expected = case.expected
    compare(
        case, outcome, loss=expected["loss"], grad=expected["grad_logprobs"], per_token=expected.get("per_token_loss")
    )
    _check_metrics(case, outcome, drop=drop)


def _metrics(case: Case) -> Fields:
    metrics = case.expected["metrics"]
    assert isinstance(metrics, Fields)
    return metrics


def _check_metrics(case: Case, outcome: Outcome, *, drop: str | None) -> None:
    metrics = _metrics(case)
    for key in metrics:
        match key:
            case "actor/pg_clipfrac":
                assert drop is not None
                assert_close(outcome.mean("clip_fraction"), metrics[key], case, "metric", key)
            case "actor/pg_clipfrac_lower":
                _check_lower(case, outcome, metrics, key)
            case _:
                _check_kl_metric(case, outcome, metrics, key)


def _check_lower(case: Case, outcome: Outcome, metrics: Fields, key: str) -> None:
    method = outcome.terms.method
    lower = outcome.mean("dual_clip_fraction") if method.dual_clipped_T is not None else 0.0
    cap = maybe(case.params, "clip_ratio_c")
    if method.dual_clipped_T is None and cap is not None:  # DPPO: truncated ratios inside the trust region
        mask_T = outcome.terms.mask_T
        lower = float(((method.ratio_T > cap) & ~method.clipped_T & mask_T).sum() / mask_T.sum())
    assert_close(lower, metrics[key], case, "metric", key)


def _check_kl_metric(case: Case, outcome: Outcome, metrics: Fields, key: str) -> None:
    assert key == "actor/ppo_kl", key
    terms = outcome.terms
    drift_T = (terms.anchor_logp_T - terms.logp_T).clamp(-CLAMP, CLAMP)
    assert_close(float(drift_T[terms.mask_T].mean()), metrics[key], case, "metric", key)


def verl_weights(case: Case) -> Tensor:
    """Rollout weights: one number truncates them (TIS), two bound them and zero what is outside (IcePop)."""
    params, at = case.params, layout(case)
    level = params["rollout_is"]
    assert level in {"token", "sequence"}, level
    bounds = [float(part) for part in str(params["rollout_is_threshold"]).split("_")]
    assert len(bounds) <= 2, bounds
    by_row = level == "sequence"
    one = Filter(
        level="sequence" if by_row else "token",
        action="clamp" if len(bounds) == 1 else "zero",
        metric="ratio",
        aggregation="sum",
        upper=bounds[-1],
        lower=None if len(bounds) == 1 else bounds[0],
    )
    _check_log_ratio(case)
    mask_T = at.mask(case.inputs["loss_mask"])
    batch = LossBatch(
        rows=at.rows,
        loss_mask_T=mask_T,
        advantages_T=torch.ones_like(mask_T, dtype=at.dtype),
        old_logp_T=at.floats(case.inputs["rollout_logprobs"]),
        prox_logp_T=at.floats(case.inputs["train_logprobs"]),
    )
    config = LossConfig(
        proximal="recompute",
        behaviour_weight="sequence_product" if by_row else "token",
        filters=(one,),
        normalise_weight=bool(params["batch_normalize"]),
        log_ratio_clamp=CLAMP,
    )
    ready = prepare_minibatch([batch], config, only_rank)[0]
    assert batch.prox_logp_T is not None
    return at.back(policy_terms(batch.prox_logp_T, ready, config).weight_T)


def _check_log_ratio(case: Case) -> None:
    if case.inputs.get("log_ratio") is not None:
        difference = array(case.inputs["train_logprobs"]) - array(case.inputs["rollout_logprobs"])
        mask = array(case.inputs["loss_mask"]).astype(bool)
        np.testing.assert_allclose(array(case.inputs["log_ratio"])[mask], difference[mask], rtol=1e-6, atol=1e-6)


def check_tis(case: Case) -> None:
    weights = verl_weights(case)
    assert_close(weights, case.expected["weights"], case, "token", "weights")
    metrics = _metrics(case)
    mask = torch.as_tensor(array(case.inputs["loss_mask"])).bool()
    factor = number(metrics, "rollout_is_batch_norm_factor") if "rollout_is_batch_norm_factor" in metrics else 1.0
    applied = weights * factor  # its metrics are taken before the normalisation
    per_row = (applied * mask).sum(-1) / (mask.sum(-1) + 1e-8)
    found = {
        "rollout_is_mean": float(applied[mask].mean()),
        "rollout_is_seq_mean": float(per_row.mean()),
        "rollout_is_seq_max": float(per_row.max()),
        "rollout_is_seq_min": float(per_row.min()),
    }
    for key, value in found.items():
        assert_close(value, metrics[key], case, "metric", key)
    # The rest describes raw weights, clamped once more, and their effective sample size: its monitoring, not a loss.
    metrics.without_effect(*metrics)


def check_rs(case: Case) -> None:
    params, at = case.params, layout(case)
    _check_log_ratio(case)
    filters = rs_filters(params)
    mask_T = at.mask(case.inputs["loss_mask"])
    kept_T = admit(
        at.floats(case.inputs["train_logprobs"]),
        at.floats(case.inputs["rollout_logprobs"]),
        mask_T,
        at.rows,
        filters=filters,
        weight="none",
        clamp=CLAMP,
    ).keep_T
    want_T = torch.as_tensor(array(case.expected["loss_mask"])).bool()
    assert torch.equal(at.back(kept_T), want_T)
    metrics = _metrics(case)
    masked = 1 - float(kept_T.sum()) / float(mask_T.sum())
    assert_close(masked, metrics["rollout_rs_masked_fraction"], case, "metric", "masked fraction")
    metrics.without_effect(*metrics)  # the rest describes each criterion's values: its monitoring


def rs_filters(params: Fields) -> tuple[Filter, ...]:
    """Its criteria, each with its own bound or all with one.

    Raises:
        ValueError: names and bounds that don't fit together.
    """
    names, bounds = str(params["rollout_rs"]).split(","), str(params["rollout_rs_threshold"]).split(",")
    if len(bounds) == 1:
        bounds = bounds * len(names)
    return tuple(_rs_filter(name.strip(), bound.strip()) for name, bound in zip(names, bounds, strict=True))


def _rs_filter(name: str, bound: str) -> Filter:
    """`token_k1`, `seq_mean_k3` …; k1 is bounded by the logarithms of two ratios, the others from above only."""
    *scope, estimator = name.split("_")
    metrics: dict[str, Metric] = {"k1": "kl_k1", "k2": "kl_k2", "k3": "kl_k3"}
    aggregations: dict[str, RowAggregation] = {"sum": "sum", "mean": "mean", "max": "max"}
    numbers = [float(part) for part in bound.split("_")]
    if estimator == "k1":
        low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
        lower, upper = math.log(low), math.log(high)
    else:
        lower, upper = None, numbers[-1]
    by_row = scope[0] == "seq"
    return Filter(
        level="sequence" if by_row else "token",
        metric=metrics[estimator],
        aggregation=aggregations[scope[1]] if by_row else "mean",
        upper=upper,
        lower=lower,
        direction="old_over_prox",
    )


CHECKS: dict[str, Callable[[Case], None]] = {
    "verl_ppo": check_ppo,
    "verl_gspo": check_gspo,
    "verl_sapo": check_sapo,
    "verl_cispo": check_cispo,
    "verl_other": check_other,
    "verl_tis": check_tis,
    "verl_rs": check_rs,
}
