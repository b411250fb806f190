"""One input through several references: where they agree this project agrees; where they differ it shows which of them it follows.

What a case is about follows from its inputs, its parameters and the names of what it expects. An expected name begins with the reference:
`areal`, `verl`, `slime`, `skyrl`, `trl`, `prime`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_case import Case, Fields, array, assert_close
from loss_cases import Layout, Outcome, layout, maybe, number, run_loss, weights_of
from torch import Tensor

from stages.learning.gae import gae
from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import LossConfig
from stages.learning.losses.dppo import Dppo
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import Direction, Filter, Metric, admit
from stages.learning.losses.methods import Method
from stages.learning.losses.minibatch import m2po_cutoff
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.sapo import Sapo
from stages.learning.normalise import TokenNormalisation, normalise
from stages.learning.rows import Rows

_LOW = ("eps_low", "eps_clip_low", "clip_ratio_low", "epsilon_low", "low", "eps_clip", "eps")
_HIGH = ("eps_high", "eps_clip_higher", "eps_clip_high", "clip_ratio_high", "epsilon_high", "high")


def check_cross(case: Case) -> None:
    expected = set(case.expected)
    if "loss" in case.inputs:
        _check_aggregation(case)
    elif "values" in case.inputs:
        _check_gae(case)
    elif "rewards" in case.inputs:
        _check_group(case)
    elif any(name.startswith("areal_kl_") for name in expected):
        _check_rejection(case)
    elif any(name.endswith("_tis_product") for name in expected):
        _check_sequence_weight(case)
    elif "m2_threshold" in case.params:
        _check_m2po(case)
    else:
        _check_policy(case)


def _batch(case: Case, at: Layout) -> LossBatch:
    """Log-probs of three policies; the loss comparisons use the old one for everything that the update is measured from."""
    return LossBatch(
        rows=at.rows,
        loss_mask_T=at.mask(case.inputs["loss_mask"]),
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=at.floats(case.inputs["old_logprobs"]),
    )


def _first(params: Fields, names: tuple[str, ...]) -> float | None:
    return next((number(params, name) for name in names if params.get(name) is not None), None)


def _methods(case: Case) -> Callable[[str], Method]:
    """The method of a case, as each reference parametrises it."""
    params = case.params
    if "tau_pos" in params:
        sapo = Sapo(tau_pos=number(params, "tau_pos"), tau_neg=number(params, "tau_neg"))
        return lambda _: sapo
    if "high_delta" in params:
        cispo = Cispo(eps_clip=number(params, "low"), eps_clip_higher=number(params, "high_delta"))
        return lambda _: cispo
    if "delta" in params:
        bound = number(params, "delta")
        return lambda _: Dppo(threshold_low=bound, threshold_high=bound)
    low, high, dual = _first(params, _LOW), _first(params, _HIGH), maybe(params, "c")
    assert low is not None, f"no loss is known that has the parameters {list(params)}"
    if not _ratio_is_of_rows(case):
        return lambda _: Ppo(eps_clip=low, eps_clip_higher=high, dual_clip=dual)
    token_gradient = {"verl", "skyrl"}
    return lambda name: Gspo(
        eps_clip=low,
        eps_clip_higher=high,
        dual_clip=dual,
        advantage="row" if name == "areal" else "token",
        gradient="token" if name in token_gradient else "row",
    )


def _ratio_is_of_rows(case: Case) -> bool:
    """A clipped loss is given without its level: it is that of rows (GSPO) where AReaL's tokens of a row all have one loss."""
    areal = case.expected.get("areal")
    if not isinstance(areal, Fields) or areal.get("per_token_loss") is None:
        return False
    at = layout(case)
    mask_T, loss_T = at.mask(case.inputs["loss_mask"]), at.floats(areal["per_token_loss"])
    largest_R = at.rows.extreme(loss_T, mask_T, largest=True, empty=0.0)
    smallest_R = at.rows.extreme(loss_T, mask_T, largest=False, empty=0.0)
    return bool(torch.allclose(largest_R, smallest_R, rtol=1e-4, atol=1e-6))


def _check_policy(case: Case) -> None:
    at = layout(case)
    batch = _batch(case, at)
    case.inputs.without_effect("rollout_logprobs")  # nobody uses the rollout policy where old is everyone's anchor
    method_of = _methods(case)
    case.params.without_effect("note")
    for name in case.expected:
        reference, *words = name.split("_")
        method = method_of(reference)
        if reference == "trl" and isinstance(method, Cispo) and _check_trl_cap(case, words, method):
            continue
        logp_T = at.floats(case.inputs["logprobs"])
        weight_R = _row_weights(at, batch, reference, words, method)
        outcome = run_loss(at, logp_T, batch, _config(reference, method), weight_R)
        found = case.expected[name]
        if reference == "verl" and isinstance(method, Dppo):
            outcome = _with_log_prob_value(outcome, logp_T, weight_R)
        _compare(case, name, found, outcome, at)


def _config(reference: str, method: Method) -> LossConfig:
    """verl and SkyRL limit the log ratio before they take its exponential, the others don't."""
    limit = (10.0 if isinstance(method, Gspo) else 20.0) if reference in {"verl", "skyrl"} else None
    return LossConfig(method=method, log_ratio_clamp=limit)


def _with_log_prob_value(outcome: Outcome, logp_T: Tensor, weight_R: Tensor) -> Outcome:
    """verl's DPPO has −A·sg(r)·log π as its value, the same gradient: ours times log π."""
    per_token_T = outcome.per_token.reshape(-1) * logp_T
    loss = float((outcome.at.rows.spread(weight_R) * per_token_T)[outcome.terms.mask_T].sum())
    return replace(outcome, per_token=outcome.at.back(per_token_T), loss=loss)


def _check_trl_cap(case: Case, words: list[str], method: Cispo) -> bool:
    """Its epsilon_high is the cap itself: 1 + ours. A cap below 1 can't be said here and is refused; True: nothing to compare."""
    cap = float(".".join(word for word in words if word.isdigit()))
    if cap == 1 + method.eps_clip_higher:
        return False
    assert cap == number(case.params, "trl_cap")
    with pytest.raises(LossConfigError):
        Cispo(eps_clip=1.0, eps_clip_higher=cap - 1)
    case.expected.without_effect(f"trl_{'_'.join(words)}")
    return True


def _row_weights(at: Layout, batch: LossBatch, reference: str, words: list[str], method: Method) -> Tensor:
    mask_T = batch.loss_mask_T
    if "sum" in words:
        return torch.ones(at.rows.num_rows, dtype=at.dtype)
    by_row = isinstance(method, (Sapo, Gspo)) and (reference in {"verl", "trl", "skyrl"} or isinstance(method, Gspo))
    by_row = by_row or "seq" in words
    return weights_of(at, mask_T, "seq_mean" if by_row and "token" not in words else "token_mean")


def _compare(case: Case, name: str, found: object, outcome: Outcome, at: Layout) -> None:
    assert isinstance(found, Fields), name
    where = at.back(outcome.terms.mask_T)
    if "loss" not in found and not any("loss" in key for key in found):
        _compare_metrics(case, found, outcome)
        return
    for key in found:
        want = found[key]
        match key:
            case "loss":
                assert_close(outcome.loss, want, case, "loss", f"{name} loss")
            case "grad_logprobs":
                assert_close(outcome.grad, want, case, "gradient", f"{name} gradient")
            case "per_token_loss":
                assert_close(outcome.per_token, want, case, "token", f"{name} per-token loss", where=where)
            case "metrics":
                assert isinstance(want, Fields)
                _compare_metrics(case, want, outcome)
            case _ if name == "slime":
                _compare_slime(case, key, want, outcome, at)
            case _:
                raise AssertionError(f"{name}.{key} is unknown")


def _compare_slime(case: Case, key: str, want: object, outcome: Outcome, at: Layout) -> None:
    """Its losses and gradients under two sets of row weights, from per-token losses and gradients under one."""
    mask_T = outcome.terms.mask_T
    share = float((at.rows.count(mask_T) > 0).double().mean())
    weights = {
        "token_mean": weights_of(at, mask_T, "token_mean"),
        "seq_mean": weights_of(at, mask_T, "seq_mean") * share,
    }
    mode = "seq_mean" if "seq_mean" in key else "token_mean"
    weight_R = weights[mode]
    batch = _batch(case, at)
    again = run_loss(at, at.floats(case.inputs["logprobs"]), batch, _config("slime", _methods(case)("slime")), weight_R)
    if key.startswith("loss_"):
        assert_close(again.loss, want, case, "loss", key)
    else:
        assert key.startswith("grad_logprobs_"), key
        assert_close(again.grad, want, case, "gradient", key)


def _compare_metrics(case: Case, metrics: Fields, outcome: Outcome) -> None:
    """Clip shares agree for every reference; their other metrics are compared in the area's own data.

    Where A is 0 a DPPO token can leave the region downwards (verl, prime-rl and here) or not at all (SkyRL): it has no loss either way.
    """
    by_sign = "cispo_clip_ratio" in metrics  # TRL's counts only what A pushes up
    mask_T, clipped_T = outcome.terms.mask_T, outcome.terms.method.clipped_T
    pushed_T = mask_T & (outcome.at.floats(case.inputs["advantages"]) != 0)
    shares = {
        "clip_ratio": float((clipped_T & pushed_T).sum() / mask_T.sum()),
        "actor/pg_clipfrac": outcome.mean("clip_fraction"),
        "is_masked": outcome.mean("clip_fraction"),
        "clip_ratio/region_mean": outcome.mean("clip_fraction"),
    }
    for key, share in shares.items():
        if key in metrics and not by_sign:
            assert_close(share, metrics[key], case, "metric", key)
    metrics.without_effect(*metrics)


def _check_rejection(case: Case) -> None:
    """Direction of the filter's divergences: log(prox/old) by default, verl's is the other."""
    at = layout(case)
    case.inputs.without_effect("logprobs", "advantages")
    prox_T, old_T = at.floats(case.inputs["old_logprobs"]), at.floats(case.inputs["rollout_logprobs"])
    mask_T = at.mask(case.inputs["loss_mask"])
    for name in case.expected:
        found = case.expected[name]
        assert isinstance(found, Fields), name
        reference, _, estimator = name.split("_")
        metrics: dict[str, Metric] = {"k1": "kl_k1", "k2": "kl_k2", "k3": "kl_k3"}
        direction: Direction = "prox_over_old" if reference == "areal" else "old_over_prox"
        if reference == "areal":
            lower, upper = maybe(found, "lower"), number(found, "upper")
        else:
            bounds = [float(part) for part in str(found["threshold"]).split("_")]
            both = estimator == "k1"
            lower, upper = (float(np.log(bounds[0])), float(np.log(bounds[1]))) if both else (None, bounds[-1])
        one = Filter(metric=metrics[estimator], upper=upper, lower=lower, direction=direction)
        kept_T = admit(prox_T, old_T, mask_T, at.rows, filters=(one,), weight="none").keep_T
        assert np.array_equal(at.back(kept_T).numpy(), array(found["loss_mask"]).astype(bool)), name


def _check_sequence_weight(case: Case) -> None:
    """Geometric mean is the default here, the product can be chosen."""
    at = layout(case)
    case.inputs.without_effect("logprobs", "advantages")
    prox_T, old_T = at.floats(case.inputs["old_logprobs"]), at.floats(case.inputs["rollout_logprobs"])
    mask_T = at.mask(case.inputs["loss_mask"])
    upper = number(case.params, "upper")
    for name in case.expected:
        product = name.endswith("_product")
        # AReaL's weight is clamped from below too, at a bound that the file doesn't name: its smallest value.
        lower = None if product else float(array(case.expected[name])[at.back(mask_T).numpy()].min())
        aggregation = "sum" if product else "mean"
        one = Filter(level="sequence", action="clamp", aggregation=aggregation, upper=upper, lower=lower)
        weight = "sequence_product" if product else "sequence_geometric"
        found = at.back(admit(prox_T, old_T, mask_T, at.rows, filters=(one,), weight=weight).weight_T)
        want = np.broadcast_to(array(case.expected[name]), found.shape).tolist()
        assert_close(found, want, case, "token", name, where=at.back(mask_T))


def _check_aggregation(case: Case) -> None:
    """Only active rows and groups count; SkyRL counts all of them, TRL too."""
    at = layout(case)
    mask_T, loss_T = at.mask(case.inputs["loss_mask"]), at.floats(case.inputs["loss"])
    sizes = array(case.inputs["group_sizes"]).astype(int)
    group_R = torch.arange(len(sizes)).repeat_interleave(torch.as_tensor(sizes))
    active_R = at.rows.count(mask_T) > 0
    active_G = torch.zeros(len(sizes)).index_add(0, group_R, active_R.float()) > 0
    shares = {
        "seq_mean": active_R,
        "constant": active_R,
        "prompt_mean": active_G,
        "token_mean": torch.ones(1, dtype=torch.bool),
    }
    divisor = number(case.params, "divisor")
    assert maybe(case.params, "max_seq_len") in {None, divisor}
    for mode in case.expected:
        weight_R = weights_of(
            at, mask_T, mode, divisor=divisor if mode == "constant" else None, group_sizes=case.inputs["group_sizes"]
        )
        ours = float((at.rows.spread(weight_R) * torch.where(mask_T, loss_T, 0)).sum())
        found = case.expected[mode]
        assert isinstance(found, Fields)
        for name in found:
            all_rows = name.split("_")[0] in {"skyrl", "trl"}
            share = float(shares[mode].double().mean()) if all_rows else 1.0
            assert_close(ours * share, found[name], case, "loss", f"{mode} {name}")


def _check_m2po(case: Case) -> None:
    """Dropped tokens stay in the denominator, as in AReaL's PR #1546; its main branch divides by the kept ones."""
    params, at = case.params, layout(case)
    batch = _batch(case, at)
    prox_T = batch.old_logp_T
    batch = replace(batch, prox_logp_T=prox_T, old_logp_T=at.floats(case.inputs["rollout_logprobs"]))
    logp_T = at.floats(case.inputs["logprobs"])
    method, threshold = Ppo(eps_clip=number(params, "eps_clip")), number(params, "m2_threshold")
    weight_R = weights_of(at, batch.loss_mask_T, "token_mean")
    plain = run_loss(at, logp_T, batch, LossConfig(method=method, proximal="recompute"), weight_R)
    config = LossConfig(method=method, proximal="recompute", m2po_threshold=threshold)
    narrowed = run_loss(at, logp_T, batch, config, weight_R)
    total, kept = int(batch.loss_mask_T.sum()), int(narrowed.terms.keep_T.sum())
    assert (total, kept) == (params["n_tokens"], params["n_kept"])
    moment_T = (batch.old_logp_T - prox_T).square()
    assert int((moment_T[batch.loss_mask_T] <= m2po_cutoff(moment_T[batch.loss_mask_T], threshold)).sum()) == kept
    for name in case.expected:
        found = case.expected[name]
        assert isinstance(found, Fields)
        outcome = plain if name.startswith("no_m2po") else narrowed
        scale = total / kept if name == "areal_main" else 1.0
        assert_close(outcome.loss * scale, found["loss"], case, "loss", name)
        assert_close(outcome.grad * scale, found["grad_logprobs"], case, "gradient", name)


def _leaves(found: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(found, Fields):
        for key in found:
            yield from _leaves(found[key], (*path, *key.split("_")))
    else:
        yield path, found


def _check_group(case: Case) -> None:
    """Rewards of groups: no spread and a group of one give 0 here; verl and SkyRL pass a lone reward through."""
    reward_R = torch.as_tensor(array(case.inputs["rewards"])).reshape(-1)
    given = case.inputs.get("group_sizes")
    sizes = torch.tensor([len(reward_R)]) if given is None else torch.as_tensor(array(given)).long()
    group_R = torch.arange(len(sizes)).repeat_interleave(sizes)
    rows = Rows.from_cu_seqlens(torch.arange(len(reward_R) + 1))
    everything = torch.ones(len(reward_R), dtype=torch.bool)
    lone_R = (torch.bincount(group_R) == 1)[group_R]
    for path, want in _leaves(case.expected):
        loo = bool({"rloo", "loo"} & set(path))
        eps = {"areal": 1e-5, "trl": 1e-4}.get(next((word for word in path if word in {"areal", "trl"}), ""), 1e-6)
        level = "batch" if "batch" in path else "group"
        config = TokenNormalisation(mean=level, std="none" if loo else level, leave_one_out=loo, eps=eps)
        ours_R = normalise(reward_R, everything, rows, config, group_R=group_R, num_groups=len(sizes))
        assert bool((ours_R[lone_R] == 0).all())
        theirs_R = torch.as_tensor(array(want)).reshape(-1)
        if len(theirs_R) == 1 != len(ours_R):  # one number: that of the lone row
            assert int(lone_R.sum()) == 1
            theirs_R = torch.where(lone_R, theirs_R, ours_R)
        passes_through = bool((theirs_R[lone_R] != 0).any())
        assert not (passes_through and "areal" in path and not loo), path
        assert_close(
            ours_R,
            theirs_R.tolist(),
            case,
            "normalised",
            ".".join(path),
            where=~lone_R if passes_through else everything,
        )


def _check_gae(case: Case) -> None:
    """Masked tokens are skipped, as by AReaL and verl; SkyRL and slime run through them."""
    params = case.params
    rewards_key = next(key for key in ("token_level_rewards", "rewards") if key in case.inputs)
    mask_key = next(key for key in ("response_mask", "loss_mask") if key in case.inputs)
    at = layout(case, like=mask_key)
    mask_T, values_T = at.mask(case.inputs[mask_key]), at.floats(case.inputs["values"])
    discount, lam = _first(params, ("gamma", "discount")), _first(params, ("lam", "gae_lambda", "lambda"))
    assert discount is not None
    assert lam is not None
    for path, want in _leaves(case.expected):
        through = bool({"skyrl", "slime"} & set(path))
        steps_T = torch.ones_like(mask_T) if through else mask_T
        found = gae(at.floats(case.inputs[rewards_key]), values_T, steps_T, at.rows, discount=discount, gae_lambda=lam)
        ours_T = found.returns_T if "returns" in path else found.advantages_T
        assert_close(at.back(ours_T), want, case, "token", ".".join(path), where=at.back(mask_T))


CHECKS: dict[str, Callable[[Case], None]] = {"cross": check_cross}
