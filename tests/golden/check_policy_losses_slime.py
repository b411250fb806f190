"""slime's and prime-rl's policy losses as settings of the project's, and the kinds that several references share.

slime: old policy = proximal, rollout policy = behaviour; per-token losses, once as a token mean, once as a mean of row means over all
rows. prime-rl: the inference policy is the anchor, losses are sums, each token times a given weight.
"""

from collections.abc import Callable

import torch
from check_policy_losses_skyrl import check_dppo as check_skyrl_dppo
from check_policy_losses_trl import check_trl
from check_policy_losses_verl import check_dppo as check_verl_dppo
from check_policy_losses_verl import verl_row_weights
from golden_case import Case, Fields, array, assert_close
from loss_cases import Layout, Outcome, compare, layout, maybe, number, optional, run_loss, weights_of

from stages.learning.logprobs import logprobs_from_logits
from stages.learning.losses.batch import LossBatch
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import Distillation, LossConfig
from stages.learning.losses.dppo import Dppo
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.importance import BehaviourWeight, Filter, OffPolicySequenceMask
from stages.learning.losses.kl import KlEstimate, kl_estimate
from stages.learning.losses.methods import Method
from stages.learning.losses.policy import policy_loss
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.reinforce import Likelihood
from stages.learning.rows import Rows


def slime_method(params: Fields) -> Method:
    clip = {"eps_clip": number(params, "eps_clip"), "eps_clip_higher": number(params, "eps_clip_high")}
    dual = maybe(params, "eps_clip_c")
    match params["mode"]:
        case "ppo":
            return Ppo(**clip, dual_clip=dual)
        case "gspo":  # token advantages, gradient through the mean
            return Gspo(**clip, dual_clip=dual, advantage="token")
        case "cispo":
            assert dual is None
            return Cispo(**clip)
        case other:
            raise AssertionError(f"mode {other} is unknown")


def slime_correction(given: object) -> tuple[tuple[Filter, ...], BehaviourWeight]:
    if given is None:
        return (), "none"
    assert isinstance(given, Fields)
    name = given["fn"]
    assert name in {"vanilla", "icepop"}, name
    low = number(given, "low") or None  # 0 is no bound for a ratio
    return (Filter(action="clamp" if name == "vanilla" else "zero", upper=number(given, "high"), lower=low),), "token"


def check_slime(case: Case) -> None:
    params, at, expected = case.params, layout(case), case.expected
    filters, weight = slime_correction(params.get("tis"))
    delta = maybe(params, "opsm_delta")
    config = LossConfig(
        method=slime_method(params),
        proximal="recompute",
        filters=filters,
        behaviour_weight=weight,
        off_policy_sequence_mask=None if delta is None else OffPolicySequenceMask(delta=delta, against="prox"),
    )
    batch = LossBatch(
        rows=at.rows,
        loss_mask_T=at.mask(case.inputs["loss_mask"]),
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=at.floats(case.inputs["rollout_logprobs"]),
        prox_logp_T=at.floats(case.inputs["old_logprobs"]),
    )
    logp_T = at.floats(case.inputs["logprobs"])
    outcome = run_loss(at, logp_T, batch, config, weights_of(at, batch.loss_mask_T, "token_mean"))
    compare(
        case,
        outcome,
        loss=expected["loss_token_mean"],
        grad=expected["grad_logprobs_token_mean"],
        per_token=expected["per_token_loss"],
    )
    share = float((at.rows.count(batch.loss_mask_T) > 0).double().mean())  # it divides by all rows
    by_row = run_loss(at, logp_T, batch, config, weights_of(at, batch.loss_mask_T, "seq_mean") * share)
    compare(case, by_row, loss=expected["loss_seq_mean_over_all_rows"], grad=expected["grad_logprobs_seq_mean"])
    _check_slime_masks(case, outcome)


def _check_slime_masks(case: Case, outcome: Outcome) -> None:
    expected, terms, at = case.expected, outcome.terms, outcome.at
    where = at.back(terms.mask_T)
    assert_close(
        at.back(terms.method.clipped_T.to(at.dtype)), expected["clipfrac_mask"], case, "token", "clipped", where=where
    )
    if expected.get("opsm_mask") is not None:
        weighed = where & at.back(terms.admission.weight_T != 0)  # elsewhere IcePop has taken the weight already
        silent = at.back((terms.weight_T != 0).to(at.dtype))
        assert_close(silent, expected["opsm_mask"], case, "token", "opsm", where=weighed)
        expected.without_effect("opsm_clipfrac")  # a sum over rows of shares that count untrained tokens
    metrics = expected.get("tis_metrics")
    if metrics is not None:
        assert isinstance(metrics, Fields)
        raw_T = (terms.anchor_logp_T - terms.old_logp_T).exp()
        found = {"tis": raw_T, "tis_abs": (raw_T - 1).abs(), "tis_clipfrac": terms.admission.changed_T}
        for key in metrics:
            assert_close(at.back(found[key].to(at.dtype)), metrics[key], case, "token", key, where=where)


def prime_batch(case: Case, at: Layout) -> LossBatch:
    return LossBatch(
        rows=at.rows,
        loss_mask_T=at.mask(case.inputs["loss_mask"]),
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=at.floats(case.inputs["inference_logprobs"]),
        teacher_logp_T=optional(case, at, "ref_logprobs"),
        importance_weight_T=optional(case, at, "loss_weights"),
    )


def check_prime(case: Case, config: LossConfig) -> None:
    at, expected = layout(case), case.expected
    batch = prime_batch(case, at)
    weight_R = torch.ones(at.rows.num_rows, dtype=at.dtype)
    outcome = run_loss(at, at.floats(case.inputs["logprobs"]), batch, config, weight_R)
    compare(case, outcome, loss=expected["loss"], grad=expected["grad_logprobs"], per_token=expected["per_token_loss"])
    _check_prime_metrics(case, outcome, batch)


def check_prime_dppo(case: Case) -> None:
    params = case.params
    method = Dppo(
        threshold_low=number(params, "dppo_mask_low"),
        threshold_high=number(params, "dppo_mask_high"),
        adv_tau=number(params, "adv_tau"),
        kl_tau=number(params, "kl_tau"),
    )
    check_prime(case, LossConfig(method=method))


def check_prime_ipo(case: Case) -> None:
    bound = number(case.params, "ipo_threshold")
    method = Dppo(
        threshold_low=bound,
        threshold_high=bound,
        applies="always",
        adv_tau=number(case.params, "adv_tau"),
        kl_tau=number(case.params, "kl_tau"),
    )
    check_prime(case, LossConfig(method=method))


def check_prime_ref_kl(case: Case) -> None:
    """On-policy distillation: the teacher's gap is the advantage, tokens that fell by more than 0.2 are left out."""
    method = Dppo(threshold_low=0.2, threshold_high=None, applies="always", kl_tau=1e-3)
    check_prime(case, LossConfig(method=method, distillation=Distillation(form="advantage", coef=1.0, rl_weight=0.0)))


def check_prime_ce(case: Case) -> None:
    check_prime(case, LossConfig(method=Likelihood()))


def _check_prime_metrics(case: Case, outcome: Outcome, batch: LossBatch) -> None:
    metrics = case.expected["metrics"]
    assert isinstance(metrics, Fields)
    terms = outcome.terms
    mask_T, out_T = terms.mask_T, terms.mask_T & terms.method.clipped_T
    mismatch_T = kl_estimate(terms.old_logp_T, terms.logp_T, KlEstimate(estimator="k3"))
    up_T, down_T = batch.advantages_T > 0, batch.advantages_T < 0

    def mean(value_T: torch.Tensor, where_T: torch.Tensor) -> float:
        return float(value_T[where_T].double().mean()) if where_T.any() else 0.0

    found = {
        "masked_mismatch_kl": mean(mismatch_T, out_T),
        "unmasked_mismatch_kl": mean(mismatch_T, mask_T & ~out_T),
        "is_masked": mean(out_T, mask_T),
        "is_masked_low": mean(out_T & down_T, mask_T),
        "is_masked_high": mean(out_T & up_T, mask_T),
        "masked_advantage_positive": mean(up_T, out_T),
        "masked_advantage_negative": mean(down_T, out_T),
        "nll": mean(-terms.logp_T, mask_T),
        "ref_kl": 0.0 if terms.teacher_gap_T is None else -mean(terms.teacher_gap_T, mask_T),
    }
    for key in metrics:
        assert_close(found[key.removeprefix("ref_kl/")], metrics[key], case, "metric", key)


def check_dppo(case: Case) -> None:
    if "inference_logprobs" in case.inputs:
        return check_prime_dppo(case)
    if "dppo" in case.params:
        return check_skyrl_dppo(case)
    return check_verl_dppo(case, "kl" if "dppo_kl" in case.source else "tv")


def check_entropy(case: Case) -> None:
    if "logits" not in case.inputs:
        return check_trl(case)
    logits = torch.as_tensor(array(case.inputs["logits"])).requires_grad_()
    mask = torch.as_tensor(array(case.inputs["loss_mask"])).bool()
    flat_TV, mask_T = logits.reshape(-1, logits.shape[-1]), mask.reshape(-1)
    logp_T, entropy_T = logprobs_from_logits(flat_TV, torch.zeros(len(flat_TV), dtype=torch.int64))
    rows = Rows.from_cu_seqlens(torch.arange(mask.shape[0] + 1) * mask.shape[1])
    at = Layout(shape=tuple(mask.shape), rows=rows, dtype=torch.float64)
    nothing_T = torch.zeros_like(logp_T.detach())
    batch = LossBatch(rows=rows, loss_mask_T=mask_T, advantages_T=nothing_T, old_logp_T=nothing_T, entropy_T=entropy_T)
    loss_T, stats = policy_loss(nothing_T, batch, LossConfig(entropy_coef=1.0))
    loss = -(rows.spread(verl_row_weights(at, mask_T, case.params["loss_agg_mode"])) * loss_T).sum()
    loss.backward()
    assert_close(float(loss.detach()), case.expected["entropy_loss"], case, "loss", "entropy")
    assert_close(at.back(entropy_T), case.expected["per_token_entropy"], case, "token", "per-token entropy")
    assert logits.grad is not None
    assert_close(logits.grad, case.expected["grad_logits"], case, "gradient", "gradient of logits")
    assert int(stats["entropy"].count) == int(mask_T.sum())
    return None


CHECKS: dict[str, Callable[[Case], None]] = {
    "slime_ppo": check_slime,
    "slime_cispo": check_slime,
    "slime_tis": check_slime,
    "slime_opsm": check_slime,
    "slime_*": check_slime,
    "prime_ipo": check_prime_ipo,
    "prime_ref_kl": check_prime_ref_kl,
    "prime_ce": check_prime_ce,
    "dppo": check_dppo,
    "entropy": check_entropy,
}
