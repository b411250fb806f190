"""TRL's policy losses as settings of the project's: its old policy is the proximal one, its sampling policy the behaviour policy."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from golden_case import Case, Fields, assert_close
from loss_cases import Layout, Outcome, compare, layout, maybe, number, optional, run_loss
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import LossConfig
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import OffPolicySequenceMask
from stages.learning.losses.kl import KlPenalty
from stages.learning.losses.methods import Method
from stages.learning.losses.policy import policy_loss
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.sapo import Sapo
from stages.learning.losses.vespo import Vespo


def trl_batch(case: Case, at: Layout) -> LossBatch:
    mask_T = at.mask(case.inputs["loss_mask"])
    prox_T = optional(case, at, "old_logprobs")
    sampling_T = optional(case, at, "sampling_logprobs")
    behaviour_T = prox_T if sampling_T is None else sampling_T
    assert behaviour_T is not None, "no sampling or old log-probs"
    return LossBatch(
        rows=at.rows,
        loss_mask_T=mask_T,
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=behaviour_T,
        prox_logp_T=prox_T,
        ref_logp_T=optional(case, at, "ref_logprobs"),
        entropy_T=optional(case, at, "entropies"),
        importance_weight_T=optional(case, at, "importance_sampling_ratio"),
    )


def trl_row_weights(params: Fields, at: Layout, mask_T: Tensor) -> Tensor:
    """Its normalisers: means over all rows (empty ones included), over tokens, over a given count."""
    rows = at.rows.num_rows
    counts_R = at.rows.count(mask_T).clamp(min=1).to(at.dtype)
    steps = number(params, "gradient_accumulation_steps")
    kind = params["loss_type"]
    if kind not in {"dapo", "cispo", "vespo"}:
        params.without_effect("num_items_in_batch")
    if kind != "dr_grpo":
        params.without_effect("max_completion_length")
    match kind:
        case "grpo" | "sapo":
            return 1 / (counts_R * rows * steps)
        case "bnpo":
            return torch.full_like(counts_R, 1 / (max(1, int(mask_T.sum())) * steps))
        case "dr_grpo":
            return torch.full_like(counts_R, 1 / (rows * number(params, "max_completion_length") * steps))
        case "dapo" | "cispo" | "vespo":
            return torch.full_like(counts_R, 1 / max(1.0, number(params, "num_items_in_batch")))
        case "luspo":  # the row's loss times its length: the sum over its tokens
            return torch.full_like(counts_R, 1 / (rows * steps))
        case _:
            raise AssertionError(f"loss_type {kind} is unknown")


def trl_method(params: Fields) -> Method:
    kind, level = params["loss_type"], params["importance_sampling_level"]
    assert level in {"token", "sequence"}, level
    low, high, delta = number(params, "epsilon_low"), number(params, "epsilon_high"), maybe(params, "delta")
    # Temperatures are float32 there whatever the log-probs are.
    pos, neg = (float(np.float32(number(params, f"sapo_temperature_{side}"))) for side in ("pos", "neg"))
    shape = params["vespo"]
    assert isinstance(shape, Fields)
    shapes = {f"{name}_{side}": number(shape, f"{name}_{side}") for name in ("k", "lambda") for side in ("pos", "neg")}
    match kind:
        case "cispo":  # its epsilon_high is the cap itself
            assert level == "token"
            return Cispo(eps_clip=1.0, eps_clip_higher=high - 1)
        case "sapo":
            return Sapo(tau_pos=pos, tau_neg=neg, level=str(level))
        case "vespo":
            return Vespo(**shapes)
        case "luspo":
            assert level == "sequence", "luspo sums a row's loss over its tokens: it is defined at sequence level"
            return Gspo(eps_clip=low, eps_clip_higher=high, dual_clip=delta, advantage="token")
        case _ if level == "sequence":
            return Gspo(eps_clip=low, eps_clip_higher=high, dual_clip=delta, advantage="token")
        case _:
            return Ppo(eps_clip=low, eps_clip_higher=high, dual_clip=delta)


def trl_config(case: Case) -> LossConfig:
    params = case.params
    beta, threshold = number(params, "beta"), maybe(params, "off_policy_mask_threshold")
    return LossConfig(
        method=trl_method(params),
        proximal="reuse_train" if case.inputs.get("old_logprobs") is None else "recompute",
        kl_penalty=KlPenalty(coef=beta) if beta else None,
        off_policy_sequence_mask=None if threshold is None else OffPolicySequenceMask(delta=threshold),
    )


def check_trl(case: Case) -> None:
    at = layout(case)
    batch, config = trl_batch(case, at), trl_config(case)
    weight_R = trl_row_weights(case.params, at, batch.loss_mask_T)
    logp_T = at.floats(case.inputs["logprobs"])
    outcome = run_loss(at, logp_T, batch, config, weight_R)
    bonus = _entropy_bonus(case, at, batch, config, logp_T)
    outcome = replace(outcome, loss=outcome.loss + bonus)
    compare(case, outcome, loss=case.expected["loss"], grad=case.expected["grad_logprobs"])
    # Its reported policy loss comes before the division by the accumulation steps.
    steps = number(case.params, "gradient_accumulation_steps")
    scale = 1.0 if case.params["loss_type"] in {"dapo", "cispo", "vespo"} else steps
    _check_metrics(case, outcome, policy_loss=scale * (outcome.loss - bonus))


def _entropy_bonus(case: Case, at: Layout, batch: LossBatch, config: LossConfig, logp_T: Tensor) -> float:
    """What the bonus adds. It is a mean over tokens there for every loss type, so the row weights of a token mean measure it."""
    coef = number(case.params, "entropy_coef")
    if not coef:
        return 0.0
    with_bonus = LossConfig(method=config.method, proximal=config.proximal, entropy_coef=coef)
    plain = LossConfig(method=config.method, proximal=config.proximal)
    scale = 1 / (float(batch.loss_mask_T.sum()) * number(case.params, "gradient_accumulation_steps"))
    if case.params["loss_type"] in {"dapo", "cispo", "vespo"}:
        scale = 1 / number(case.params, "num_items_in_batch")
    return scale * float((policy_loss(logp_T, batch, with_bonus)[0] - policy_loss(logp_T, batch, plain)[0]).sum())


def _check_metrics(case: Case, outcome: Outcome, *, policy_loss: float) -> None:
    metrics = case.expected["metrics"]
    assert isinstance(metrics, Fields)
    terms = outcome.terms
    mask_T, ratio_T = terms.mask_T, terms.method.ratio_T
    advantages_T = outcome.at.floats(case.inputs["advantages"])
    low, high = number(case.params, "epsilon_low"), number(case.params, "epsilon_high")
    sides = {"low": (ratio_T < 1 - low) & (advantages_T < 0), "high": (ratio_T > 1 + high) & (advantages_T > 0)}
    sides["region"] = sides["low"] | sides["high"]
    by_row = case.params["importance_sampling_level"] == "sequence"
    first_T = mask_T if not by_row else _first_of_rows(outcome.at)
    found = {f"clip_ratio/{name}_mean": float(where_T[first_T].double().mean()) for name, where_T in sides.items()}
    found["cispo_clip_ratio"] = float(((ratio_T > high) & (advantages_T > 0))[mask_T].double().mean())
    found |= {"policy_loss": policy_loss, "entropy_coef": number(case.params, "entropy_coef")}
    if "kl_to_reference" in outcome.stats:
        found["kl"] = outcome.mean("kl_to_reference")
    if case.inputs.get("entropies") is not None:
        found["entropy"] = outcome.mean("entropy")
    for key, value in found.items():
        if key in metrics:
            assert_close(value, metrics[key], case, "metric", key)
    # Smallest and largest row shares; and the entropy of a model that is not in the data unless `entropies` is given.
    metrics.without_effect(*metrics)


def _first_of_rows(at: Layout) -> Tensor:
    """One token of each row, for values that are the same in the whole row."""
    first_T = torch.ones_like(at.rows.row_T, dtype=torch.bool)
    first_T[1:] = at.rows.row_T[1:] != at.rows.row_T[:-1]
    return first_T


CHECKS: dict[str, Callable[[Case], None]] = {
    "trl_ppo": check_trl,
    "trl_cispo": check_trl,
    "trl_gspo": check_trl,
    "trl_other": check_trl,
    "trl_tis": check_trl,
    "trl_*": check_trl,
}
