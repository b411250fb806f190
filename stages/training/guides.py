"""What else gives values for the tokens of a step: a reference model, a teacher, a critic. None is needed by a plain run.

Everything is computed with the weights before the step's first update. Shapes: T tokens of a pack, R its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from schemas.messages.training import Manifest
from stages.training.batches import MicroBatch
from stages.training.critic import Critic
from stages.training.errors import TrainingError
from stages.training.networks import FrozenModel
from stages.training.ports import RowArrays
from stages.training.ranks import Ranks
from stages.training.statistics import Tally
from stages.training.token_advantages import GAE, AdvantageSettings, Row, token_advantages

Plan = Sequence[Sequence[Sequence[int]]]
"""[mini-batch][micro-batch] → rows, of this rank."""


class Guided:
    """A step's micro-batches with everything filled in."""

    def __init__(self, batches: Sequence[Sequence[MicroBatch]]) -> None:
        self.batches: Sequence[Sequence[MicroBatch]] = batches
        self.old_values: list[list[Tensor]] = []
        self.returns: list[list[Tensor]] = []
        self.tally: Final = Tally()
        self.num_critic_updates = 0

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Statistics; collective."""
        return self.tally.means(ranks)


class Guides:
    """Those of a run, on one rank."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        reference: FrozenModel | None = None,
        teacher: FrozenModel | None = None,
        critic: Critic | None = None,
        critic_warmup_steps: int = 0,
        advantages: AdvantageSettings | None = None,
    ) -> None:
        self._ranks: Final = ranks
        self._reference: Final = reference
        self._teacher: Final = teacher
        self.critic: Final = critic
        self._critic_warmup_steps: Final = critic_warmup_steps
        self._advantages: Final = advantages or AdvantageSettings()

    def only_critic(self, step: int) -> bool:
        """The policy rests while the critic is young."""
        return self.critic is not None and step <= self._critic_warmup_steps

    def prepare(
        self,
        manifest: Manifest,
        rows: Mapping[int, RowArrays],
        plan: Plan,
        batches: Sequence[Sequence[MicroBatch]],
    ) -> Guided:
        """Fill in log-probs of the frozen models, values and advantages. Collective.

        Raises:
            TrainingError: The step's estimator and the critic don't go together.
        """
        from_rewards = manifest.algorithm == GAE
        if from_rewards != (self.critic is not None):
            raise TrainingError(
                f"the manifest of step {manifest.step} was made with estimator {manifest.algorithm} and the trainer has "
                f"{'no' if self.critic is None else 'a'} critic: gae needs one (training.critic.enabled), others have no use for it"
            )
        guided = Guided([self._with_logprobs(mini, manifest.temperature) for mini in batches])
        if self.critic is not None:
            guided.old_values = [self.critic.values(mini) for mini in guided.batches]
        if from_rewards or self._advantages.is_needed:
            self._estimate(guided, manifest, rows, plan)
        return guided

    def train_critic(self, guided: Guided, *, num_updates_before: int) -> list[str]:
        """The critic's updates of the step; what was skipped and why."""
        if self.critic is None:
            return []
        guided.num_critic_updates, skipped = self.critic.train(
            guided.batches, guided.old_values, guided.returns, guided.tally, num_updates_before=num_updates_before
        )
        return skipped

    def _with_logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[MicroBatch]:
        losses = [batch.loss for batch in batches]
        if self._reference is not None:
            found = self._reference.logprobs(batches, temperature)
            losses = [replace(loss, ref_logp_T=logp_T) for loss, logp_T in zip(losses, found, strict=True)]
        if self._teacher is not None:
            found = self._teacher.logprobs(batches, temperature)
            losses = [replace(loss, teacher_logp_T=logp_T) for loss, logp_T in zip(losses, found, strict=True)]
        return [msgspec.structs.replace(batch, loss=loss) for batch, loss in zip(batches, losses, strict=True)]

    def _estimate(self, guided: Guided, manifest: Manifest, rows: Mapping[int, RowArrays], plan: Plan) -> None:
        filled: list[list[MicroBatch]] = []
        for number, (mini, batches) in enumerate(zip(plan, guided.batches, strict=True)):
            if not batches:  # the same on every rank
                filled.append([])
                guided.returns.append([])
                continue
            found, returns, stats = token_advantages(
                batches,
                [self._row(manifest, rows, micro, batch) for micro, batch in zip(mini, batches, strict=True)],
                guided.old_values[number] if guided.old_values else None,
                self._advantages,
                from_rewards=manifest.algorithm == GAE,
                num_groups=len(manifest.groups),
                reduce=self._reduced,
            )
            filled.append(found)
            guided.returns.append(returns)
            guided.tally.add(stats)
        guided.batches = filled

    def _row(self, manifest: Manifest, rows: Mapping[int, RowArrays], indices: Sequence[int], batch: MicroBatch) -> Row:
        device = self._ranks.device
        if not indices:
            num_rows = batch.loss.rows.num_rows
            return Row(
                reward_R=torch.zeros(num_rows, device=device),
                group_R=torch.zeros(num_rows, dtype=torch.int64, device=device),
                turns_T=torch.full(batch.weight_T.shape, -1, dtype=torch.int64, device=device),
            )
        chosen = list(indices)
        turns = np.concatenate([rows[index].turns for index in chosen])
        return Row(
            reward_R=torch.from_numpy(manifest.advantage.as_numpy()[chosen]).to(device, torch.float32),
            group_R=torch.from_numpy(manifest.row_group.as_numpy()[chosen]).to(device, torch.int64),
            turns_T=torch.from_numpy(turns).to(device, torch.int64),
        )

    def _reduced(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        self._ranks.sum(total)
        return total
