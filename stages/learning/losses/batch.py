"""What a loss is given and what it gives back. Knows tensors only; where they come from is the trainer's business.

Everything is token-aligned and packed. Shapes: T = tokens of the pack, R = rows. Two masks (README of the numbers: m and d):
d = `loss_mask_T`, the tokens that a row is trained on and that the row weights divide by; m ⊆ d, what is left after rejection.
A loss is never aggregated here: the step's loss is Σ_t w_t·ℓ_t with w_t the row weight of the manifest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.learning.rows import Rows


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """The tokens of one micro-batch. All values outside `loss_mask_T` are junk (even NaN) and never matter."""

    rows: Rows
    loss_mask_T: Tensor
    """bool, d: the trained tokens."""
    advantages_T: Tensor
    old_logp_T: Tensor
    """Log-probs of the behaviour policy: what the sampler recorded."""
    prox_logp_T: Tensor | None = None
    """Log-probs of the proximal policy, recomputed before the step's first mini-batch; None: not recomputed."""
    ref_logp_T: Tensor | None = None
    """Reference model, for the KL penalty."""
    teacher_logp_T: Tensor | None = None
    """Teacher, for distillation."""
    entropy_T: Tensor | None = None
    """Entropy of the current policy's next-token distribution, with gradient where there is an entropy bonus."""
    importance_weight_T: Tensor | None = None
    """Given factor of each token's policy loss, beside the behaviour weight that the config computes."""
    versions_T: Tensor | None = None
    """Weights version that sampled each token, −1 for tokens that no policy sampled."""
    current_version: int | None = None
    """v_θ: the version that this step makes. The step starts from v_θ − 1, the proximal policy; a token is v_θ − 1 − its version old."""
    narrowed_T: Tensor | None = None
    """bool, tokens that a rule over the whole mini-batch kept (`prepare_minibatch`)."""
    selected_T: Tensor | None = None
    """bool, tokens that a method picked over the whole mini-batch (`prepare_minibatch`)."""
    weight_scale: Tensor | None = None
    """Scalar factor of all behaviour weights (`prepare_minibatch`)."""
    distill_scale: Tensor | None = None
    """Scalar factor of the distillation term: trained / kept tokens of the mini-batch (`prepare_minibatch`)."""


@dataclass(frozen=True, kw_only=True)
class Stat:
    """A mean in two parts, so that it can be summed over micro-batches and ranks before it is divided."""

    total: Tensor
    count: Tensor

    def mean(self) -> Tensor:
        """The mean; 0 where nothing was counted."""
        return self.total / self.count.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Cleaned input of a method: finite outside the mask, nothing but `logp_T` carries a gradient."""

    logp_T: Tensor
    anchor_logp_T: Tensor
    """Proximal policy (old policy where there is none): the denominator of the ratio r."""
    advantages_T: Tensor
    mask_T: Tensor
    """bool, d."""
    keep_T: Tensor
    """bool, m: what rejection left of d."""
    weight_T: Tensor
    """Behaviour weight times the given importance weight."""
    rows: Rows
    log_ratio_clamp: float | None
    selected_T: Tensor | None

    @property
    def log_ratio_T(self) -> Tensor:
        """Log πθ − log πprox. Two equal infinities are a ratio of 1; a single one stays infinite."""
        return log_ratio(self.logp_T, self.anchor_logp_T)

    def ratio(self, log_ratio: Tensor) -> Tensor:
        """Ratio of a log ratio within the configured clamp (no gradient beyond it)."""
        return bounded_exp(log_ratio, self.log_ratio_clamp)


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """What a method makes of the tokens, before weights and masks are applied."""

    loss_T: Tensor
    ratio_T: Tensor
    """r as the method uses it (per token or its row's)."""
    clipped_T: Tensor
    """bool, tokens whose gradient the method cut or bounded."""
    dual_clipped_T: Tensor | None = None
    weighted: bool = False
    """True: the method used `Tokens.weight_T` itself."""
    extra: dict[str, Tensor] | None = None
    """More per-token values to report."""


def log_ratio(logp_T: Tensor, base_logp_T: Tensor) -> Tensor:
    """Difference of log-probs; 0 where both are the same infinity (NaN otherwise), all other infinities stay."""
    same_T = (logp_T == base_logp_T) & torch.isinf(logp_T)
    zero = torch.zeros_like(logp_T)
    return torch.where(same_T, zero, logp_T) - torch.where(same_T, zero, base_logp_T)


def bounded_exp(x: Tensor, clamp: float | None) -> Tensor:
    """Exponential of the argument limited to ±clamp where one is set."""
    return (x if clamp is None else x.clamp(-clamp, clamp)).exp()
