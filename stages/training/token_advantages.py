"""Advantages that need token values: KL in the reward, GAE with the critic's values, normalisation over all ranks.

    row reward ─ at its last trained token ─┐
    −coef·KL(behaviour ‖ reference) ────────┴─ GAE over tokens ─ normalisation ─▶ advantages, returns

With turns as steps the KL reward is no part of the return: it is added to each token's advantage afterwards. A turn has one advantage
for all its tokens, and the sum of their KL would be charged to every one of them and to the critic's targets.
With any estimator but gae the manifest's advantages stand, and the KL rewards still to come are added to them.
Knows micro-batches and tensors. Shapes: T tokens of a pack, R its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import torch
from torch import Tensor

from stages.learning.gae import Unit, gae, num_steps
from stages.learning.losses.batch import Stat
from stages.learning.losses.kl import KlPenalty
from stages.learning.normalise import TokenNormalisation, normalise
from stages.learning.rows import Rows
from stages.learning.token_rewards import GaeLambda, kl_rewards, lambdas, place_rewards
from stages.training.batches import MicroBatch
from stages.training.errors import TrainingError

GAE: Final = "gae"
"""The estimator that leaves the advantages to the trainer; the manifest's column then holds rewards."""


class AdvantageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards become token advantages in the trainer."""

    discount: float = 1.0
    """γ per step, in 0 … 1."""
    gae_lambda: GaeLambda = GaeLambda()
    unit: Unit = "token"
    """What a step of GAE is."""
    kl_reward: KlPenalty | None = None
    """Lower each token's reward by coef times the estimate of KL(behaviour ‖ reference)."""
    normalisation: TokenNormalisation | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1:
            raise TrainingError(f"discount: expected 0 to 1, found {self.discount}")

    @property
    def is_needed(self) -> bool:
        """Something is to be done with any estimator."""
        return self.kl_reward is not None or self.normalisation is not None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What GAE must know of a micro-batch beside its tokens."""

    reward_R: Tensor
    group_R: Tensor
    """int64: index among the step's groups."""
    turns_T: Tensor
    """int64: interaction of each token, −1 outside."""


def token_advantages(
    batches: Sequence[MicroBatch],
    rows: Sequence[Row],
    values: Sequence[Tensor] | None,
    settings: AdvantageSettings,
    *,
    from_rewards: bool,
    num_groups: int,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[list[MicroBatch], list[Tensor], dict[str, Stat]]:
    """One mini-batch's micro-batches with their advantages, the critic's targets [T] of each, statistics. Collective.

    Args:
        batches: this rank's.
        rows: of each.
        values: the critic's, [T] of each; None: no critic.
        settings: the rules.
        from_rewards: the estimator is gae.
        num_groups: groups of the step.
        reduce: sums a tensor over the ranks.
    """
    advantages: list[Tensor] = []
    returns: list[Tensor] = []
    kl_sum, kl_count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i, (batch, row) in enumerate(zip(batches, rows, strict=True)):
        kl_T = _kl_rewards(batch, settings)
        kl_sum = kl_sum + kl_T.sum().double().cpu()
        kl_count = kl_count + batch.loss.loss_mask_T.sum().double().cpu()
        found_T, return_T = _estimate(batch, row, None if values is None else values[i], kl_T, settings, from_rewards)
        advantages.append(found_T)
        returns.append(return_T)
    if settings.normalisation is not None:
        advantages = _normalised(batches, rows, advantages, settings.normalisation, num_groups, reduce)
    filled = [
        msgspec.structs.replace(batch, loss=replace(batch.loss, advantages_T=advantage_T.to(torch.float32)))
        for batch, advantage_T in zip(batches, advantages, strict=True)
    ]
    stats = {} if settings.kl_reward is None else {"kl_reward": Stat(total=kl_sum, count=kl_count)}
    return filled, returns, stats


def _kl_rewards(batch: MicroBatch, settings: AdvantageSettings) -> Tensor:
    loss, rule = batch.loss, settings.kl_reward
    if rule is None:
        return torch.zeros_like(loss.old_logp_T)
    if loss.ref_logp_T is None:
        raise TrainingError("kl_reward needs a reference model's log-probs")
    return kl_rewards(loss.old_logp_T, loss.ref_logp_T, loss.loss_mask_T, coef=rule.coef, estimate=rule)


def _estimate(
    batch: MicroBatch,
    row: Row,
    values_T: Tensor | None,
    kl_T: Tensor,
    settings: AdvantageSettings,
    from_rewards: bool,
) -> tuple[Tensor, Tensor]:
    mask_T, rows = batch.loss.loss_mask_T, batch.loss.rows
    if not from_rewards:
        later = gae(kl_T, None, mask_T, rows, discount=settings.discount, gae_lambda=1.0).advantages_T
        return torch.where(mask_T, batch.loss.advantages_T, 0) + later, torch.zeros_like(kl_T)
    turns_T = row.turns_T if settings.unit == "turn" else None
    outcome_T = place_rewards(row.reward_R, mask_T, rows)
    rewards_T = outcome_T + kl_T if turns_T is None else outcome_T
    lambda_R = lambdas(settings.gae_lambda, num_steps(mask_T, rows, turns_T), dtype=torch.float32)
    found = gae(rewards_T, values_T, mask_T, rows, discount=settings.discount, gae_lambda=lambda_R, turn_ids_T=turns_T)
    return found.advantages_T if turns_T is None else found.advantages_T + kl_T, found.returns_T


def _normalised(
    batches: Sequence[MicroBatch],
    rows: Sequence[Row],
    advantages: Sequence[Tensor],
    config: TokenNormalisation,
    num_groups: int,
    reduce: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Over all micro-batches at once, so that each rank meets the others equally often."""
    sizes = [len(x_T) for x_T in advantages]
    joined = _joined([batch.loss.rows for batch in batches])
    flat_T = normalise(
        torch.cat(list(advantages)),
        torch.cat([batch.loss.loss_mask_T for batch in batches]),
        joined,
        config,
        group_R=torch.cat([row.group_R for row in rows]),
        num_groups=num_groups,
        reduce=reduce,
    )
    return list(flat_T.split(sizes))


def _joined(packs: Sequence[Rows]) -> Rows:
    """The rows of several packs behind each other."""
    first, parts = 0, list[Tensor]()
    for pack in packs:
        parts.append(pack.row_T + first)
        first += pack.num_rows
    return Rows(row_T=torch.cat(parts), num_rows=first)
