"""Log-probs of the proximal policy, the one that a step's updates are measured from, without or with a forward pass for it.

    recompute    given: a forward pass with the weights before the step's first mini-batch
    loglinear    log πold + α·(log πθ − log πold), α = (v_prox − v_old)/(v_θ − v_old) in [0, 1], v_prox = v_θ − 1
    linear       log((1 − α)·πold + α·πθ)
    rollout      log πold
    reuse_train  log πθ without gradient (r is 1: one mini-batch a step)
    none         there is none: r is taken against the old policy

v_θ is the version that the step makes, so v_prox are the weights that it starts from. A given recomputed value wins over an approximation. Tokens that no policy sampled (version < 0) get α = 0. Knows no loss.
"""

from typing import Literal

import torch
from torch import Tensor

from stages.learning.losses.batch import Stat
from stages.learning.losses.errors import LossInputError

Proximal = Literal["recompute", "loglinear", "linear", "rollout", "reuse_train", "none"]


def proximal_logp(
    method: Proximal,
    logp_T: Tensor,
    old_logp_T: Tensor,
    *,
    given_T: Tensor | None = None,
    versions_T: Tensor | None = None,
    current_version: int | None = None,
) -> Tensor:
    """Log-probs of the proximal policy, without gradient.

    Raises:
        LossInputError: the method needs a value that is not given.
    """
    match method:
        case "reuse_train":
            return logp_T.detach()
        case "none":
            return old_logp_T.detach()
        case _ if given_T is not None:
            return given_T.detach()
        case "rollout":
            return old_logp_T.detach()
        case "recompute":
            raise LossInputError(
                "proximal = recompute needs prox_logp_T: run the forward pass before the first mini-batch"
            )
        case "loglinear" | "linear":
            if versions_T is None or current_version is None:
                missing = "versions_T" if versions_T is None else "current_version"
                raise LossInputError(
                    f"proximal = {method} needs {missing}: the version that sampled each token and the one trained now"
                )
            alpha_T = interpolation(versions_T, current_version, logp_T.dtype)
            return interpolate(method, logp_T.detach(), old_logp_T.detach(), alpha_T)


def interpolation(versions_T: Tensor, current_version: int, dtype: torch.dtype) -> Tensor:
    """α: how far the proximal version lies on the way from the sampling version to the current one, in [0, 1]."""
    gap_T = (current_version - versions_T).to(dtype)
    alpha_T = ((gap_T - 1) / gap_T.clamp(min=1)).clamp(0, 1)
    return torch.where((versions_T >= 0) & (gap_T > 0), alpha_T, 0)


def interpolate(method: Literal["loglinear", "linear"], logp_T: Tensor, old_logp_T: Tensor, alpha_T: Tensor) -> Tensor:
    """Mean of the two policies' log-probs (loglinear) or probabilities (linear), weighted by α. α = 0 gives log πold exactly."""
    if method == "loglinear":
        mixed_T = old_logp_T + alpha_T * (logp_T - old_logp_T)
    else:
        mixed_T = torch.logaddexp(torch.log1p(-alpha_T) + old_logp_T, alpha_T.log() + logp_T)
    return torch.where(alpha_T > 0, mixed_T, old_logp_T)


def require_finite(prox_logp_T: Tensor, mask_T: Tensor | None = None) -> None:
    """Refuse recomputed log-probs that are not numbers; waits for the device, so call it once per recomputation.

    Raises:
        LossInputError: a trained token has NaN or an infinity.
    """
    bad_T = ~prox_logp_T.isfinite()
    count = int((bad_T if mask_T is None else bad_T & mask_T).sum())
    if count:
        raise LossInputError(
            f"{count} trained tokens have recomputed log-probs that are not finite; look at the weights and the inputs"
        )


def approximation_errors(
    prox_logp_T: Tensor,
    logp_T: Tensor,
    old_logp_T: Tensor,
    mask_T: Tensor,
    *,
    versions_T: Tensor,
    current_version: int,
) -> dict[str, Stat]:
    """How far each approximation is from a recomputed value: log-probs, and the weights that would follow from them.

    Keys are `<approximation>/<quantity>`; relative errors are of the recomputed value.
    """
    alpha_T = interpolation(versions_T, current_version, logp_T.dtype)
    candidates = {
        "loglinear": interpolate("loglinear", logp_T.detach(), old_logp_T, alpha_T),
        "linear": interpolate("linear", logp_T.detach(), old_logp_T, alpha_T),
        "rollout": old_logp_T,
    }
    values: dict[str, Tensor] = {}
    for name, guess_T in candidates.items():
        values |= {
            f"{name}/{key}": x_T for key, x_T in _errors(guess_T, prox_logp_T, logp_T.detach(), old_logp_T).items()
        }
    count = mask_T.sum()
    return {key: Stat(total=torch.where(mask_T, x_T, 0).sum(), count=count) for key, x_T in values.items()}


def _errors(guess_T: Tensor, true_T: Tensor, logp_T: Tensor, old_logp_T: Tensor) -> dict[str, Tensor]:
    pairs = {
        "behave_imp_weight": ((guess_T - old_logp_T).exp(), (true_T - old_logp_T).exp()),
        "importance_weight": ((logp_T - guess_T).exp(), (logp_T - true_T).exp()),
    }
    error_T = guess_T - true_T
    out = {
        "approx_logp": guess_T,
        "abs_error": error_T.abs(),
        "rel_error": error_T.abs() / (true_T.abs() + _TINY),
        "squared_error": error_T.square(),
    }
    for key, (found_T, right_T) in pairs.items():
        out[key] = found_T
        out[f"{key}_abs_error"] = (found_T - right_T).abs()
        out[f"{key}_rel_error"] = (found_T - right_T).abs() / (right_T.abs() + _TINY)
    return out


_TINY = 1e-8  # keeps a relative error of a certain token (log-prob 0) finite
