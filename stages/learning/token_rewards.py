"""Rewards of tokens, and the λ of rows: what comes before the advantage estimate in a trainer with a reference model or a critic.

Order of a step: overlong penalty → the row's reward (assembly) → KL reward per token → `gae` → `normalise.normalise`.
Knows tensors and rows. Shapes: T = tokens of the packs, R = rows.
"""

from typing import Literal

import msgspec
import torch
from torch import Tensor

from stages.learning.losses.checks import at_least, choice
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.kl import KlEstimate, kl_estimate
from stages.learning.rows import Rows


def overlong_penalty(num_tokens_R: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float) -> Tensor:
    """What a row's reward loses (≤ 0) when it comes near the length limit (DAPO, arXiv:2503.14476): [R] float64.

    0 up to max_tokens − buffer_tokens, then falling linearly to −factor at max_tokens, and further beyond.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise LossConfigError(f"overlong buffer is {buffer_tokens} tokens, expected 1 to max_tokens = {max_tokens}")
    over_R = num_tokens_R.double() - (max_tokens - buffer_tokens)
    return (-over_R / buffer_tokens * factor).clamp(max=0)


def place_rewards(reward_R: Tensor, mask_T: Tensor, rows: Rows) -> Tensor:
    """Give each row's reward to its last trained token: [T]. A row without one loses it."""
    position_T = torch.arange(len(mask_T), device=mask_T.device)
    last_R = rows.extreme(position_T.double(), mask_T, largest=True, empty=-1.0).long()
    out_T = reward_R.new_zeros(len(mask_T))
    has_R = last_R >= 0
    out_T[last_R[has_R]] = reward_R[has_R]
    return out_T


def kl_rewards(old_logp_T: Tensor, ref_logp_T: Tensor, mask_T: Tensor, *, coef: float, estimate: KlEstimate) -> Tensor:
    """−coef·KL estimate of the behaviour policy to the reference at each trained token: [T], 0 outside the mask."""
    old_T, ref_T = torch.where(mask_T, old_logp_T, 0), torch.where(mask_T, ref_logp_T, 0)
    return torch.where(mask_T, -coef * kl_estimate(old_T, ref_T, estimate), 0)


class GaeLambda(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """λ as a function of a row's number of steps L."""

    form: Literal["constant", "vapo", "relative_position"] = "constant"
    """constant: `value`; vapo (arXiv:2504.05118): max(0, 1 − 1/(value·L)); relative_position: value^(1/(L − 1)), so
    that the last step's δ has the weight `value` in the first step's advantage (1 for a row of one step)."""
    value: float = 1.0

    def __post_init__(self) -> None:
        choice(self.form, Literal["constant", "vapo", "relative_position"], "gae_lambda.form")
        at_least(self.value, 0, "gae_lambda.value")
        if self.form != "vapo" and self.value > 1:
            raise LossConfigError(f"gae_lambda.value is {self.value}, expected at most 1 for form {self.form}")
        if self.form == "vapo" and self.value == 0:
            raise LossConfigError("gae_lambda.value is 0, expected a number > 0 for form vapo")


def lambdas(config: GaeLambda, num_steps_R: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """λ of each row: [R]."""
    steps_R = num_steps_R.to(dtype)
    match config.form:
        case "constant":
            return torch.full_like(steps_R, config.value)
        case "vapo":
            return (1 - 1 / (config.value * steps_R.clamp(min=1))).clamp(min=0)
        case "relative_position":
            base = torch.as_tensor(config.value, dtype=dtype, device=steps_R.device)
            return torch.where(steps_R > 1, torch.pow(base, 1 / (steps_R - 1).clamp(min=1)), 1)
