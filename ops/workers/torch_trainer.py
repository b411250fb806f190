"""The torch backends, made from a run's config. Imports torch: only the trainer's process comes here."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from ops.config import RunConfig, check_keys
from ops.workers.partitioning import Planner, partition_settings
from schemas.errors import ConfigError
from stages.learning.losses.config import LossConfig
from stages.training.ports import TrainerBackend
from stages.training.ranks import process_group
from stages.training.torch_backend import TorchBackend, TorchBackendSettings, set_determinism
from stages.training.updates import OptimizerSettings


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
