"""The critic's loss: regression of values to returns, clipped like PPO's policy. Knows nothing of policies.

ℓ = max(h(v − R), h(v_old + clip(v − v_old, ±ε) − R)), h = x²/2 or Huber. Aggregated like a policy loss, with the row weights.
"""

from typing import Literal

import msgspec
import torch
from torch import Tensor

from stages.learning.losses.batch import Stat
from stages.learning.losses.checks import above, choice
from stages.learning.losses.errors import LossConfigError

Form = Literal["mse", "huber"]


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the critic's loss."""

    form: Form = "mse"
    """mse: x²/2; huber: x²/2 up to `huber_delta`, linear beyond."""
    value_clip: float | None = 0.2
    """How far a value may move from the one before the step; None: no clip."""
    huber_delta: float = 10.0

    def __post_init__(self) -> None:
        choice(self.form, Form, "critic.form")
        above(self.value_clip, 0, "critic.value_clip")
        above(self.huber_delta, 0, "critic.huber_delta")


def value_loss(
    values_T: Tensor, old_values_T: Tensor | None, returns_T: Tensor, mask_T: Tensor, config: CriticConfig
) -> tuple[Tensor, dict[str, Stat]]:
    """Per-token loss [T], 0 outside the mask, and statistics.

    Args:
        values_T: current values, with gradient.
        old_values_T: values before the step; needed for the clip.
        returns_T: targets.
        mask_T: bool, the trained tokens.
        config: the settings.
    """
    values_T, returns_T = torch.where(mask_T, values_T, 0), torch.where(mask_T, returns_T, 0)
    loss_T, clipped_T = _error(values_T - returns_T, config), torch.zeros_like(mask_T)
    if config.value_clip is not None:
        if old_values_T is None:
            raise LossConfigError(
                "critic.value_clip needs the values before the step; give them or set value_clip to none"
            )
        old_T = torch.where(mask_T, old_values_T.detach(), 0)
        bounded_T = old_T + (values_T - old_T).clamp(-config.value_clip, config.value_clip)
        bounded_loss_T = _error(bounded_T - returns_T, config)
        clipped_T = (bounded_loss_T > loss_T) & mask_T
        loss_T = torch.maximum(loss_T, bounded_loss_T)
    count = mask_T.sum()
    found_T = loss_T.detach()
    stats = {
        "critic_loss": Stat(total=found_T.sum(), count=count),
        "value_clip_fraction": Stat(total=clipped_T.sum(), count=count),
        "value": Stat(total=values_T.detach().sum(), count=count),
        "return": Stat(total=returns_T.sum(), count=count),
        "value_error_squared": Stat(total=(values_T - returns_T).detach().square().sum(), count=count),
        "return_squared": Stat(total=returns_T.square().sum(), count=count),
    }
    return loss_T, stats


def _error(x_T: Tensor, config: CriticConfig) -> Tensor:
    if config.form == "mse":
        return x_T.square() / 2
    delta = config.huber_delta
    return torch.where(x_T.abs() <= delta, x_T.square() / 2, delta * (x_T.abs() - delta / 2))
