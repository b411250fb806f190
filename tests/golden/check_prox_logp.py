"""Log-probs of the proximal policy: approximations, which of them is used, and how far they are off."""

from collections.abc import Callable

import pytest
import torch
from golden_case import Case, Fields, array, assert_close
from loss_cases import Layout, layout, number, optional
from torch import Tensor

from stages.learning.losses.errors import LossInputError
from stages.learning.losses.kl import KlEstimate, kl_estimate
from stages.learning.losses.proximal import Proximal, approximation_errors, proximal_logp, require_finite


def _inputs(case: Case) -> tuple[Layout, Tensor, Tensor, Tensor | None]:
    at = layout(case, like="logprobs")
    versions = case.inputs.get("versions")
    versions_T = None if versions is None else at.ints(versions)
    return at, at.floats(case.inputs["logprobs"]), at.floats(case.inputs["old_logprobs"]), versions_T


def check_approximation(case: Case) -> None:
    at, logp_T, old_T, versions_T = _inputs(case)
    current = int(number(case.params, "current_version"))
    given = case.inputs.get("loss_mask")
    where = None if given is None else torch.as_tensor(array(given)).bool()
    methods: tuple[Proximal, ...] = ("loglinear", "linear", "rollout")
    for method in methods:
        found_T = proximal_logp(method, logp_T, old_T, versions_T=versions_T, current_version=current)
        assert_close(at.back(found_T), case.expected[method], case, "token", method, where=where)


def check_resolve(case: Case) -> None:
    params = case.params
    at, logp_T, old_T, versions_T = _inputs(case)
    current = None if params.get("current_version") is None else int(number(params, "current_version"))
    given_T = optional(case, at, "prox_logp_given")
    name = str(params["prox_logp_method"])
    # "metrics" recomputes and reports the approximations beside it. "reuse_train_logp" is given the detached log-probs as the value.
    methods: dict[str, Proximal] = {
        "metrics": "recompute",
        "reuse_train_logp": "reuse_train",
        "recompute": "recompute",
        "loglinear": "loglinear",
        "linear": "linear",
        "rollout": "rollout",
    }
    if name == "reuse_train_logp" and given_T is not None:
        logp_T = given_T

    def resolve() -> Tensor:
        found_T = proximal_logp(
            methods[name], logp_T, old_T, given_T=given_T, versions_T=versions_T, current_version=current
        )
        require_finite(found_T)
        return found_T

    if case.expected.get("error") is not None:
        with pytest.raises(LossInputError):
            resolve()
        return
    assert_close(at.back(resolve()), case.expected["prox_logp"], case, "token", "prox_logp")


def check_metrics(case: Case) -> None:
    """What is known of a recomputed policy and its approximations; without one, what an approximation says by itself."""
    at, logp_T, old_T, versions_T = _inputs(case)
    assert case.params["prox_logp_method"] in {"metrics", "loglinear", "recompute", "reuse_train_logp"}
    mask_T = at.mask(case.inputs["loss_mask"])
    given_T = optional(case, at, "prox_logp_given")
    true_T = logp_T if given_T is None else given_T
    current = case.params.get("current_version")

    def stats(where_T: Tensor) -> dict[str, Tensor]:
        found = {}
        if versions_T is not None and current is not None:
            version = int(number(case.params, "current_version"))
            found = approximation_errors(true_T, logp_T, old_T, where_T, versions_T=versions_T, current_version=version)
        new = {
            "prox_logp_gt": true_T,
            "kl_div_direct": kl_estimate(old_T, logp_T, KlEstimate(estimator="k1")),
            "kl_div_taylor": kl_estimate(logp_T, old_T, KlEstimate(estimator="k2")),
            "kl_div_dual": kl_estimate(old_T, logp_T, KlEstimate(estimator="k3")),
        }
        return {key: stat.mean() for key, stat in found.items()} | {
            key: value_T[where_T].mean() for key, value_T in new.items()
        }

    means, per_token = case.expected["means"], case.expected["per_token"]
    assert isinstance(means, Fields)
    assert isinstance(per_token, Fields)
    found = stats(mask_T)
    for key in means:
        assert_close(float(found[key]), means[key], case, "metric", key)
    for position in mask_T.nonzero().squeeze(-1).tolist():
        one_T = torch.zeros_like(mask_T)
        one_T[position] = True
        single = stats(one_T)
        for key in per_token:
            want = float(array(per_token[key]).reshape(-1)[position])
            assert float(single[key]) == pytest.approx(want, rel=5e-5, abs=5e-6), (key, position)


def staleness(versions_T: Tensor, mask_T: Tensor, current: int) -> dict[str, float]:
    """How old the sampled tokens under the mask are, against the version trained now and the one it starts from."""
    versions_N = versions_T[mask_T & (versions_T >= 0)].double()
    if not len(versions_N):
        return {}
    found: dict[str, float] = {
        "v_theta": current,
        "v_proximal": current - 1,
        "n_valid_generated_tokens": len(versions_N),
    }
    for name, reference in {"theta": current, "proximal": current - 1}.items():
        stale_N = reference - versions_N
        found |= {
            f"sample_staleness_{name}_{key}": float(value)
            for key, value in {"avg": stale_N.mean(), "max": stale_N.max(), "min": stale_N.min()}.items()
        }
    return found


def check_staleness(case: Case) -> None:
    at = layout(case, like="versions")
    given = case.inputs.get("loss_mask")
    versions_T = at.ints(case.inputs["versions"])
    mask_T = torch.ones_like(versions_T, dtype=torch.bool) if given is None else at.mask(given)
    found = staleness(versions_T, mask_T, int(number(case.params, "current_version")))
    for key in case.expected:
        fields = case.expected[key]
        wanted = fields if isinstance(fields, Fields) else case.expected
        for name in wanted if isinstance(fields, Fields) else (key,):
            assert_close(found[name], wanted[name], case, "metric", name)


CHECKS: dict[str, Callable[[Case], None]] = {
    "approximation": check_approximation,
    "resolve": check_resolve,
    "approx_metrics": check_metrics,
    "staleness_*": check_staleness,
    "version_*": check_staleness,
}
