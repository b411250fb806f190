"""Where a group's rows stand in the manifest of their step."""

from __future__ import annotations

import msgspec

from schemas.messages.training import Manifest


class RowPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a row stands in its step, from the manifest."""

    row: str
    step: int
    slot: int
    reward: float
    advantage: float
    loss_weight: float
    mini_batch: int
    num_tokens: int
    num_loss_tokens: int
    min_version: int
    max_version: int

    @property
    def staleness(self) -> int:
        """Versions between the oldest token and the weights that were trained."""
        return self.step - 1 - self.min_version


def rows_of(manifest: Manifest, group: str) -> list[RowPlace]:
    """A group's rows in a manifest; none if it is not in the step."""
    if group not in manifest.groups:
        return []
    position = manifest.groups.index(group)
    return [
        place for number, place in enumerate(row_places(manifest)) if manifest.row_group.as_numpy()[number] == position
    ]


def row_places(manifest: Manifest) -> list[RowPlace]:
    """All rows of a manifest, in the order of training."""
    columns = (
        manifest.row_slot,
        manifest.reward,
        manifest.advantage,
        manifest.loss_weight,
        manifest.mini_batch,
        manifest.num_tokens,
        manifest.num_loss_tokens,
        manifest.min_version,
        manifest.max_version,
    )
    return [
        RowPlace(
            row=row,
            step=manifest.step,
            slot=int(slot),
            reward=float(reward),
            advantage=float(advantage),
            loss_weight=float(weight),
            mini_batch=int(mini_batch),
            num_tokens=int(tokens),
            num_loss_tokens=int(loss_tokens),
            min_version=int(oldest),
            max_version=int(newest),
        )
        for row, slot, reward, advantage, weight, mini_batch, tokens, loss_tokens, oldest, newest in zip(
            manifest.row_ids, *(column.as_numpy() for column in columns), strict=True
        )
    ]
