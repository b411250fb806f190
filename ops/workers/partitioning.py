"""Each step's rows over ranks and micro-batches, as [training] asks for it. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from ops.config import RunConfig
from schemas.messages.training import Manifest
from stages.assembly.partition import (
    MicroBatchPacking,
    OverlongRows,
    Partition,
    PartitionSettings,
    RankBalance,
    partition_manifest,
)

log = structlog.get_logger("headrace.trainer")

_NAMED_ROWS: Final = 16


def partition_settings(config: RunConfig) -> PartitionSettings:
    """[training]'s keys about ranks and micro-batches."""
    training = config.training
    return PartitionSettings(
        max_tokens_per_microbatch=training.max_tokens_per_microbatch,
        balance=RankBalance(training.balance),
        packing=MicroBatchPacking(training.packing),
        overlong=OverlongRows(training.overlong_rows),
        tokens_multiple=training.tokens_multiple,
        microbatch_multiple=training.microbatch_multiple,
    )


class Planner:
    """The partition of each step, computed once a rank; over-long rows are named in one warning a step."""

    def __init__(self, settings: PartitionSettings, *, warn: bool) -> None:
        self._settings: Final = settings
        self._warn: Final = warn
        self._latest: tuple[int, int, Partition] | None = None

    def __call__(self, manifest: Manifest, num_ranks: int) -> Sequence[Sequence[Sequence[Sequence[int]]]]:
        """[rank][mini-batch][micro-batch] → rows.

        Raises:
            OverlongRowError: a row above the budget where `training.overlong_rows` refuses it.
        """
        latest = self._latest
        if latest is not None and latest[:2] == (manifest.step, num_ranks):
            return latest[2].ranks
        found = partition_manifest(manifest, num_ranks, self._settings)
        self._latest = (manifest.step, num_ranks, found)
        if found.overlong_rows and self._warn:
            lengths = manifest.num_tokens.as_numpy()
            log.warning(
                "rows are longer than training.max_tokens_per_microbatch: each is computed alone",
                step=manifest.step,
                budget_tokens=self._settings.max_tokens_per_microbatch,
                rows={manifest.row_ids[row]: int(lengths[row]) for row in found.overlong_rows[:_NAMED_ROWS]},
                num_rows=len(found.overlong_rows),
            )
        return found.ranks
