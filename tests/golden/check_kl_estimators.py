"""KL estimators of all references as settings of one function."""

from collections.abc import Callable

import pytest
import torch
from golden_case import Case, array, assert_close
from loss_cases import number
from torch import Tensor

from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.kl import KlEstimate, binary_kl, kl_estimate


def _tensor(case: Case, key: str) -> Tensor:
    return torch.as_tensor(array(case.inputs[key]), dtype=torch.float32 if case.dtype == "float32" else torch.float64)


def _check(case: Case, settings: KlEstimate, mask: Tensor | None = None) -> None:
    logp = _tensor(case, "logprobs").requires_grad_()
    old = _tensor(case, "old_logprobs") if case.inputs.get("old_logprobs") is not None else None
    found = kl_estimate(logp, _tensor(case, "ref_logprobs"), settings, old)
    found.sum().backward()
    assert_close(found.detach(), case.expected["kl"], case, "token", "kl", where=mask)
    if case.expected.get("grad_of_sum") is not None:
        assert_close(logp.grad, case.expected["grad_of_sum"], case, "gradient", "gradient")


def check_areal(case: Case) -> None:
    clamp = 10.0 if case.params["clamp"] else None
    _check(case, KlEstimate(estimator=str(case.params["estimator"]), result_clamp=clamp))


def check_verl(case: Case) -> None:
    """A trailing + takes k2's gradient; k3 clamps d at ±20 and its result at ±10."""
    name = str(case.params["estimator"])
    straight = name.endswith("+") and name not in {"mse+", "k2+"}
    base = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name.rstrip("+"), name.rstrip("+"))
    clamps = {"log_ratio_clamp": 20.0, "result_clamp": 10.0} if base == "k3" else {}
    # The reference clamps k3 itself, not the gradient it borrows from k2.
    if straight and base == "k3":
        _check_borrowed(case, KlEstimate(estimator="k3", **clamps))
    else:
        _check(case, KlEstimate(estimator=base, gradient_of_k2=straight, **clamps))


def _check_borrowed(case: Case, clamped: KlEstimate) -> None:
    """Value of the clamped estimator, gradient of k2 without any clamp."""
    logp = _tensor(case, "logprobs").requires_grad_()
    ref = _tensor(case, "ref_logprobs")
    found = kl_estimate(
        logp, ref, KlEstimate(estimator="k3", gradient_of_k2=True, log_ratio_clamp=clamped.log_ratio_clamp)
    )
    found.sum().backward()
    assert_close(kl_estimate(logp.detach(), ref, clamped), case.expected["kl"], case, "token", "kl")
    assert_close(logp.grad, case.expected["grad_of_sum"], case, "gradient", "gradient")


def check_slime(case: Case) -> None:
    name = str(case.params["estimator"])
    weighted = case.params.get("importance_ratio") is not None
    base = {"low_var_kl": "k3"}.get(name, name)
    clamp = 10.0 if name == "low_var_kl" else None
    _check(case, KlEstimate(estimator=base, result_clamp=clamp, importance_weighted=weighted))


def check_skyrl(case: Case) -> None:
    name = str(case.params["estimator"])
    clamps = {"log_ratio_clamp": 20.0, "result_clamp": 10.0} if name == "k3" else {}
    _check(case, KlEstimate(estimator=name, **clamps), mask=torch.as_tensor(array(case.inputs["loss_mask"])).bool())


def check_binary_kl(case: Case) -> None:
    """The reference adds eps to probabilities and so caps what diverges; here nothing is added, and two certain tokens give 0."""
    log_p, log_q = _tensor(case, "log_p"), _tensor(case, "log_q")
    eps = number(case.params, "eps")
    if case.defect:  # not a number for two certain tokens there
        certain = (log_p.float().exp() == 1) & (log_q.float().exp() == 1)
        assert bool(certain.any()), f"unknown defect: {case.note}"
        assert bool((torch.stack([binary_kl(log_p, log_q), binary_kl(log_q, log_p)])[:, certain].abs() < eps).all())
        return
    least = torch.stack([log_p.exp(), log_q.exp(), -torch.expm1(log_p), -torch.expm1(log_q)]).min(0).values
    plain = least > 1e-3
    assert bool(plain.any())
    for key, found in {"kl_pq": binary_kl(log_p, log_q), "kl_qp": binary_kl(log_q, log_p)}.items():
        want = torch.as_tensor(array(case.expected[key]), dtype=found.dtype)
        # A shift of eps moves a logarithm by at most eps/least, each of four weighted by at most 1.
        assert bool(((found - want).abs()[plain] <= 4 * eps / least[plain] + 1e-9).all()), key
        assert bool((found[~plain] >= want[~plain] - 4 * eps).all()), key
        assert bool((found[log_p == log_q] == 0).all()), key


def check_areal_logged(case: Case) -> None:
    """Its logged divergences of the update: direct old − new, Taylor d²/2, dual e^d − 1 − d (k3 with the policies swapped)."""
    new, old = _tensor(case, "logprobs"), _tensor(case, "old_logprobs")
    mask = torch.as_tensor(array(case.inputs["loss_mask"])).bool()
    found = {
        "kl_div_direct": kl_estimate(old, new, KlEstimate(estimator="k1")),
        "kl_div_taylor": kl_estimate(new, old, KlEstimate(estimator="k2")),
        "kl_div_dual": kl_estimate(old, new, KlEstimate(estimator="k3")),
    }
    for key, value in found.items():
        assert_close(value, case.expected[key], case, "token", key, where=mask)


def check_error(case: Case) -> None:
    assert case.expected["error"]
    with pytest.raises(LossConfigError, match="estimator"):
        KlEstimate(estimator=str(case.params["estimator"]))


CHECKS: dict[str, Callable[[Case], None]] = {
    "areal": check_areal,
    "verl": check_verl,
    "slime": check_slime,
    "skyrl": check_skyrl,
    "binary_kl": check_binary_kl,
    "areal_logged": check_areal_logged,
    "error": check_error,
}
