"""The torch backends, made from a run's config. Imports torch: only the trainer's process comes here."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import structlog

from ops.config import RunConfig, check_keys
from schemas.errors import ConfigError
from schemas.messages.training import Manifest
from stages.assembly.partition import (
    MicroBatchPacking,
    OverlongRows,
    Partition,
    PartitionSettings,
    RankBalance,
    partition_manifest,
)
from stages.learning.losses.config import LossConfig
from stages.training.ports import TrainerBackend
from stages.training.ranks import process_group
from stages.training.torch_backend import TorchBackend, TorchBackendSettings, set_determinism
from stages.training.updates import OptimizerSettings

log = structlog.get_logger("headrace.trainer")

_NAMED_ROWS: Final = 16


def loss_config(config: RunConfig) -> LossConfig:
    """[loss], decoded strictly.

    Raises:
        ConfigError: an unknown key, or settings that exclude each other.
    """
    check_keys(config.loss, LossConfig, "loss")
    try:
        return msgspec.convert(config.loss, LossConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"loss: {error}") from error


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


@contextmanager
def open_torch_backend(config: RunConfig, model_folder: str, checkpoint_dir: str) -> Generator[TrainerBackend]:
    """One rank of the configured backend, over the model folder of version 0."""
    training = config.training
    if training.deterministic:
        set_determinism(seed=config.run.seed, threads=training.threads)
    settings = TorchBackendSettings(
        model_folder=model_folder,
        checkpoint_dir=checkpoint_dir,
        keep_checkpoints=training.keep_checkpoints,
        optimizer=OptimizerSettings(
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            warmup_updates=training.warmup_steps,
            max_grad_norm=training.max_grad_norm,
        ),
        loss=loss_config(config),
    )
    with process_group(timeout_s=training.collective_timeout_s) as ranks:
        backend = TorchBackend(settings, Planner(partition_settings(config), warn=ranks.rank == 0), ranks)
        try:
            yield backend
        finally:
            backend.close()
