"""Settings of the policy loss, and what of them excludes what. Knows no tensor.

Everything is refused by name before a run starts: a struct refuses on construction what it sees itself, `settle` what needs the
aggregation and the number of mini-batches.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from stages.learning.losses.checks import above, at_least, choice
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.importance import BehaviourWeight, Filter, OffPolicySequenceMask
from stages.learning.losses.kl import KlPenalty
from stages.learning.losses.methods import Method
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.proximal import Proximal
from stages.learning.losses.reinforce import Likelihood


class Distillation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A teacher's log-probs of the sampled tokens as a training signal (on-policy distillation)."""

    form: Literal["loss", "advantage"] = "loss"
    """loss: rl_weight·ℓ + coef·(log π − log πteacher) (KDRL), or with rl_weight 0 −coef·(π/πold)·sg(log πteacher − log π).
    advantage: A becomes rl_weight·A + coef·sg(log πteacher − log π) and the method does the rest."""
    coef: float
    rl_weight: float = 1.0

    def __post_init__(self) -> None:
        choice(self.form, Literal["loss", "advantage"], "distillation.form")
        above(self.coef, 0, "distillation.coef")
        at_least(self.rl_weight, 0, "distillation.rl_weight")


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy loss of a run."""

    method: Method = Ppo()
    proximal: Proximal = "none"
    """Which policy r is taken against; anything but `none` and `rollout` decouples it from the behaviour policy."""
    behaviour_weight: BehaviourWeight = "none"
    """Factor exp(log πprox − log πold) of the policy loss: per token, or the geometric mean or product over the row."""
    normalise_weight: bool = False
    """Divide behaviour weights by their mean over the mini-batch: over tokens, or over rows for the row-level ones."""
    filters: tuple[Filter, ...] = ()
    m2po_threshold: float | None = None
    """M2PO (arXiv:2510.01161): drop the largest (log πold − log πprox)² of the mini-batch until the mean of the rest is below this."""
    off_policy_sequence_mask: OffPolicySequenceMask | None = None
    log_ratio_clamp: float | None = None
    """Limit of every log ratio before exp, ±; None: none. 20 keeps float32 finite."""
    kl_penalty: KlPenalty | None = None
    entropy_coef: float = 0.0
    """Each kept token's loss is lowered by this times the entropy of its distribution."""
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        choice(self.proximal, Proximal, "proximal")
        choice(self.behaviour_weight, BehaviourWeight, "behaviour_weight")
        above(self.log_ratio_clamp, 0, "log_ratio_clamp")
        above(self.m2po_threshold, 0, "m2po_threshold")
        at_least(self.entropy_coef, 0, "entropy_coef")
        self._refuse_combinations()

    def _refuse_combinations(self) -> None:
        same = self.proximal in {"none", "rollout"}
        weighted = self.behaviour_weight != "none"
        if same and (weighted or self.filters):
            what = "behaviour_weight" if weighted else "filters"
            raise LossConfigError(
                f"{what} with proximal = {self.proximal}: proximal and behaviour policy are the same, every ratio is 1; "
                "set proximal to recompute, loglinear, linear or reuse_train"
            )
        for one in self.filters:
            if one.action != "mask" and not weighted:
                raise LossConfigError(
                    f"filter.action = {one.action} bounds a behaviour weight and behaviour_weight = none: set one"
                )
        if self.normalise_weight and not weighted:
            raise LossConfigError("normalise_weight with behaviour_weight = none: there is nothing to normalise")
        if self.normalise_weight and self.proximal != "recompute":
            raise LossConfigError(
                f"normalise_weight takes a mean before the first micro-batch and needs proximal = recompute, not {self.proximal}"
            )
        if self.m2po_threshold is not None and self.proximal != "recompute":
            raise LossConfigError(
                f"m2po_threshold needs proximal = recompute, not {self.proximal}: its mask is taken before the mini-batch starts"
            )
        if isinstance(self.method, Likelihood):
            self._refuse_for_likelihood(weighted=weighted)

    def _refuse_for_likelihood(self, *, weighted: bool) -> None:
        for field, given in {
            "behaviour_weight": weighted,
            "filters": bool(self.filters),
            "m2po_threshold": self.m2po_threshold is not None,
            "off_policy_sequence_mask": self.off_policy_sequence_mask is not None,
            "distillation": self.distillation is not None,
        }.items():
            if given:
                raise LossConfigError(f"{field} with method likelihood: its tokens were not sampled by a policy")


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What a run does after its settings were looked at together."""

    num_minibatches: int
    warnings: tuple[str, ...]


def settle(config: LossConfig, *, aggregation: str, num_minibatches: int) -> Settled:
    """Judge the loss together with the step it is used in.

    Raises:
        LossConfigError: the aggregation doesn't go with the loss.
    """
    distils = config.distillation is not None and config.distillation.form == "loss"
    if distils and aggregation != "token_mean":
        raise LossConfigError(
            f"distillation (form loss) is a mean over tokens: it needs aggregation token_mean, not {aggregation}"
        )
    if config.proximal == "reuse_train" and num_minibatches > 1:
        warning = f"proximal = reuse_train is exact for one mini-batch a step: using 1 instead of {num_minibatches}"
        return Settled(num_minibatches=1, warnings=(warning,))
    return Settled(num_minibatches=num_minibatches, warnings=())
