"""Distillation from a teacher: beside the RL loss, alone, and as an advantage."""

from collections.abc import Callable

import pytest
import torch
from golden_case import Case, assert_close
from loss_cases import compare, layout, maybe, number, run_loss, weights_of

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.config import Distillation, LossConfig, settle
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.policy import policy_terms
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.reinforce import Reinforce


def check_distill(case: Case) -> None:
    params, at, expected = case.params, layout(case), case.expected
    method = Ppo(
        eps_clip=number(params, "eps_clip"),
        eps_clip_higher=maybe(params, "eps_clip_higher"),
        dual_clip=maybe(params, "c_clip"),
    )
    assert params["prox_logp_method"] == "recompute"
    params.without_effect("use_decoupled_loss")  # the proximal policy is given either way
    threshold = maybe(params, "m2_threshold")
    proximal = "recompute"
    teacher = Distillation(coef=number(params, "distill_loss_weight"), rl_weight=number(params, "rl_loss_weight"))
    config = LossConfig(method=method, proximal=proximal, m2po_threshold=threshold, distillation=teacher)
    batch = LossBatch(
        rows=at.rows,
        loss_mask_T=at.mask(case.inputs["loss_mask"]),
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=at.floats(case.inputs["old_logprobs"]),
        prox_logp_T=at.floats(case.inputs["proximal_logprobs"]),
        teacher_logp_T=at.floats(case.inputs["teacher_logprobs"]),
    )
    logp_T = at.floats(case.inputs["logprobs"])
    weight_R = weights_of(at, batch.loss_mask_T, "token_mean")
    outcome = run_loss(at, logp_T, batch, config, weight_R)
    compare(case, outcome, loss=expected["loss"], grad=expected["grad_logprobs"])
    alone = LossConfig(method=method, proximal=proximal, m2po_threshold=threshold)
    assert_close(
        run_loss(at, logp_T, batch, alone, weight_R).loss, expected["rl_loss_alone"], case, "loss", "RL loss alone"
    )
    terms = outcome.terms
    assert terms.teacher_gap_T is not None
    # Alone, the gap is reported with the importance ratio that its gradient is weighted by.
    gap_T = terms.teacher_gap_T
    if not teacher.rl_weight:
        gap_T = gap_T * (terms.logp_T - terms.old_logp_T).exp()
    where = at.back(terms.keep_T)
    assert_close(at.back(gap_T), case.expected["rkl_per_token"], case, "token", "rkl", where=where)
    mean = float(gap_T[terms.keep_T].double().mean()) if terms.keep_T.any() else 0.0
    assert_close(mean, case.expected["rkl_mean"], case, "metric", "rkl mean")


def check_error(case: Case) -> None:
    assert case.expected["error"]
    config = LossConfig(proximal="recompute", distillation=Distillation(coef=0.1))
    with pytest.raises(LossConfigError, match="token_mean"):
        settle(config, aggregation=str(case.params["loss_aggregation"]), num_minibatches=1)


def check_opd(case: Case) -> None:
    """The teacher's gap is added to the advantages: with REINFORCE the loss is −A·log π, from which A is read back."""
    at = layout(case, like="student_logprobs")
    student_T, teacher_T = at.floats(case.inputs["student_logprobs"]), at.floats(case.inputs["teacher_logprobs"])
    batch = LossBatch(
        rows=at.rows,
        loss_mask_T=torch.ones_like(student_T, dtype=torch.bool),
        advantages_T=at.floats(case.inputs["advantages"]),
        old_logp_T=student_T,
        teacher_logp_T=teacher_T,
    )
    teacher = Distillation(form="advantage", coef=number(case.params, "opd_kl_coef"))
    leaf_T = student_T.clone().requires_grad_()
    terms = policy_terms(leaf_T, batch, LossConfig(method=Reinforce(), distillation=teacher))
    terms.loss_T.sum().backward()
    assert leaf_T.grad is not None
    assert_close(-leaf_T.grad, case.expected["advantages"], case, "token", "advantages")
    assert terms.teacher_gap_T is not None
    assert_close(terms.teacher_gap_T, case.expected["reverse_kl"], case, "token", "reverse KL")


CHECKS: dict[str, Callable[[Case], None]] = {
    "kdrl": check_distill,
    "pure_kd": check_distill,
    "error": check_error,
    "opd": check_opd,
}
