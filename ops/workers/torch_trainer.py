"""The torch backends, made from a run's config. Imports torch: only the trainer's process comes here."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import structlog

from ops.config import RunConfig, assembly_settings
from ops.config_shape import check_keys, convert
from ops.nodes.ranks import SESSION_ENV
from ops.training_checks import publishes_adapter
from ops.workers.partitioning import Planner, partition_settings
from schemas.errors import ConfigError
from stages.learning.losses.config import LossConfig, settle
from stages.learning.losses.critic import CriticConfig
from stages.learning.update import OptimizerSettings
from stages.training.backends import ModelSettings, open_hf_backend
from stages.training.critic import CriticSettings
from stages.training.determinism import set_determinism
from stages.training.errors import TrainingError
from stages.training.fsdp2_placement import Fsdp2Settings
from stages.training.lora import LoraSettings
from stages.training.ports import TrainerBackend
from stages.training.ranks import process_group
from stages.training.step_backend import StepSettings
from stages.training.token_advantages import AdvantageSettings

log = structlog.get_logger("headrace.trainer")

S = TypeVar("S", bound=msgspec.Struct)


def loss_config(config: RunConfig) -> LossConfig:
    """[loss], decoded strictly.

    Raises:
        ConfigError: an unknown key, or settings that exclude each other.
    """
    return _strict(config.loss, LossConfig, "loss")


def advantage_settings(config: RunConfig) -> AdvantageSettings:
    """[training.advantages], decoded strictly.

    Raises:
        ConfigError: an unknown key, or a value that can't be.
    """
    return _strict(config.training.advantages, AdvantageSettings, "training.advantages")


def check_learning(config: RunConfig) -> None:
    """What only torch's rooms can judge, before anything starts.

    Raises:
        ConfigError: a setting that can't work.
    """
    loss, advantages = loss_config(config), advantage_settings(config)
    training, assembly = config.training, assembly_settings(config)
    try:
        settled = settle(
            loss,
            aggregation=assembly.aggregation,
            num_minibatches=-(-assembly.groups_per_step // _mini_batch_groups(config, assembly.groups_per_step)),
        )
    except ValueError as error:
        raise ConfigError(f"loss: {error}") from error
    for warning in settled.warnings:
        log.warning(warning)
    if (loss.distillation is not None) != bool(training.teacher):
        missing = "training.teacher" if loss.distillation is not None else "loss.distillation"
        raise ConfigError(f"{missing}: distillation needs a teacher and a teacher is used by distillation: set both")
    if training.reference and loss.kl_penalty is None and advantages.kl_reward is None:
        raise ConfigError("training.reference: neither loss.kl_penalty nor training.advantages.kl_reward would use it")
    optimizer_settings(config)
    model_settings(config)
    publishes_adapter(config.training, config.engine)


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    """[training]'s keys about the policy's updates."""
    training = config.training
    return _made(
        OptimizerSettings,
        "training",
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
        warmup_updates=training.warmup_steps,
        max_grad_norm=training.max_grad_norm,
        schedule=training.schedule,
        total_updates=training.total_steps,
        min_lr_ratio=training.min_lr_ratio,
    )


def model_settings(config: RunConfig) -> ModelSettings:
    """[training]'s keys about models.

    Raises:
        ConfigError: a value that can't be.
    """
    training = config.training
    critic = training.critic
    critic_settings = None
    if critic.enabled:
        critic_settings = CriticSettings(
            folder=critic.folder,
            loss=_made(
                CriticConfig,
                "training.critic",
                form=critic.form,
                value_clip=critic.value_clip or None,
                huber_delta=critic.huber_delta,
            ),
            optimizer=_made(
                OptimizerSettings,
                "training.critic",
                lr=critic.learning_rate,
                weight_decay=critic.weight_decay,
                max_grad_norm=critic.max_grad_norm,
                betas=(training.adam_beta1, training.adam_beta2),
                eps=training.adam_eps,
            ),
            warmup_steps=critic.warmup_steps,
        )
    lora = training.lora
    return ModelSettings(
        dtype="bfloat16" if training.dtype == "bfloat16" else "float32",
        activation_checkpointing=training.activation_checkpointing,
        reference_folder=training.reference,
        teacher_folder=training.teacher,
        critic=critic_settings,
        lora=LoraSettings(rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets)
        if lora.enabled
        else None,
        advantages=advantage_settings(config),
        fsdp2=msgspec.convert(training.fsdp2, Fsdp2Settings, from_attributes=True)
        if training.backend == "fsdp2"
        else None,
    )


@contextmanager
def open_torch_backend(config: RunConfig, model_folder: str, checkpoint_dir: str) -> Generator[TrainerBackend]:
    """One rank of the configured backend, over the model folder of version 0.

    Raises:
        TrainingError: a model can't be used.
    """
    training = config.training
    if training.deterministic:
        set_determinism(seed=config.run.seed, threads=training.threads)
    settings = StepSettings(
        model_folder=model_folder,
        checkpoint_dir=checkpoint_dir,
        keep_checkpoints=training.keep_checkpoints,
        keep_every_steps=training.keep_checkpoints_every_steps,
        async_checkpoints=training.async_checkpoints,
        checkpoint_timeout_s=training.checkpoint_timeout_s,
        optimizer=optimizer_settings(config),
        loss=loss_config(config),
        export_dtype=training.export_dtype,
        adapter_only=publishes_adapter(config.training, config.engine),
        peak_tflops=training.peak_tflops,
    )
    models = model_settings(config)
    with process_group(
        timeout_s=training.collective_timeout_s,
        start_timeout_s=training.start_timeout_s,
        session=os.environ.get(SESSION_ENV, ""),
    ) as ranks:
        plan = Planner(partition_settings(config), warn=ranks.rank == 0)
        if training.backend == "megatron":
            from stages.training.megatron.backend import (  # noqa: PLC0415 - an extra of its own
                MegatronSettings,
                open_megatron_backend,
            )

            parallel = msgspec.convert(training.megatron, MegatronSettings, from_attributes=True)
            with open_megatron_backend(settings, models, plan, ranks, parallel) as backend:
                yield backend
            return
        with open_hf_backend(settings, models, plan, ranks) as backend:
            yield backend


def _mini_batch_groups(config: RunConfig, groups_per_step: int) -> int:
    """As the config asks; where the loss allows one mini-batch only, assembly makes one."""
    asked = config.assembly.get("mini_batch_groups")
    return asked if isinstance(asked, int) and asked > 0 else groups_per_step


def _strict(table: dict[str, Any], kind: type[S], path: str) -> S:  # Any: a TOML table
    check_keys(table, kind, path)
    try:
        return convert(table, kind, path)
    except ConfigError:
        raise
    except (ValueError, TrainingError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _made(kind: type[S], path: str, **values: object) -> S:
    return convert(values, kind, path)
