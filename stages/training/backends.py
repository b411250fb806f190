"""The torch backends put together: plain (the whole model on every rank) and FSDP2, with the guides that a run asks for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

import msgspec
import torch

from stages.training.critic import Critic, CriticSettings
from stages.training.errors import TrainingError
from stages.training.fsdp2_placement import DType, Fsdp2Placement, Fsdp2Settings, lone_group
from stages.training.guides import Guides
from stages.training.lora import LoraSettings
from stages.training.networks import FrozenModel, read_critic, read_frozen
from stages.training.placement import Placement, WholePlacement
from stages.training.policies import HfPolicy, Policy
from stages.training.ranks import Ranks
from stages.training.step_backend import Plan, StepBackend, StepSettings
from stages.training.token_advantages import AdvantageSettings


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models of a run and how they are held."""

    dtype: DType = "float32"
    """Of the master weights."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    reference_folder: str = ""
    """HF folder of the reference; empty: the policy's version 0."""
    teacher_folder: str = ""
    critic: CriticSettings | None = None
    lora: LoraSettings | None = None
    advantages: AdvantageSettings = AdvantageSettings()
    fsdp2: Fsdp2Settings | None = None
    """Split the models; None: whole on every rank."""


@contextmanager
def open_hf_backend(settings: StepSettings, models: ModelSettings, plan: Plan, ranks: Ranks) -> Generator[StepBackend]:
    """One rank of the plain or the FSDP2 backend.

    Raises:
        TrainingError: a model is missing or doesn't fit, or settings exclude each other.
    """
    if models.fsdp2 is None:
        backend = hf_backend(settings, models, plan, ranks, WholePlacement(ranks))
        try:
            yield backend
        finally:
            backend.close()
        return
    with lone_group():
        backend = hf_backend(settings, models, plan, ranks, Fsdp2Placement(ranks, models.fsdp2))
        try:
            yield backend
        finally:
            backend.close()


def plain_backend(settings: StepSettings, plan: Plan, ranks: Ranks) -> StepBackend:
    """The whole float32 model on every rank, and nothing beside it."""
    return hf_backend(settings, ModelSettings(), plan, ranks, WholePlacement(ranks))


def hf_backend(
    settings: StepSettings, models: ModelSettings, plan: Plan, ranks: Ranks, placement: Placement
) -> StepBackend:
    """A backend over HF models in a given placement."""
    policy = HfPolicy(
        settings.model_folder,
        placement,
        dtype=getattr(torch, models.dtype),
        device=ranks.device,
        recompute=models.activation_checkpointing,
        lora=models.lora,
        is_writer=ranks.rank == 0,
    )
    return StepBackend(
        settings, plan, ranks, policy, placement, make_guides(settings, models, ranks, placement, policy)
    )


def make_guides(
    settings: StepSettings, models: ModelSettings, ranks: Ranks, placement: Placement, policy: Policy
) -> Guides:
    """Those that the settings need.

    Raises:
        TrainingError: distillation without a teacher, a teacher without distillation, a critic without a use.
    """
    loss, advantages = settings.loss, models.advantages
    if loss.distillation is not None and not models.teacher_folder:
        raise TrainingError("loss.distillation needs a teacher: set training.teacher to a HF folder")
    if loss.distillation is None and models.teacher_folder:
        raise TrainingError(
            "training.teacher is set and loss.distillation is not: nothing would learn from the teacher"
        )
    needs_reference = loss.kl_penalty is not None or advantages.kl_reward is not None
    if models.reference_folder and not needs_reference:
        raise TrainingError(
            "training.reference is set and neither loss.kl_penalty nor training.kl_reward is: nothing would use the reference"
        )
    dtype: torch.dtype = getattr(torch, models.dtype)

    def frozen(folder: str, role: str) -> FrozenModel:
        return read_frozen(folder, dtype, ranks.device, placement, vocabulary=policy.vocabulary, role=role)

    critic, rule = None, models.critic
    if rule is not None:
        network = read_critic(
            rule.folder or settings.model_folder,
            dtype,
            ranks.device,
            placement,
            recompute=models.activation_checkpointing,
        )
        critic = Critic(network, rule, placement)
    reference = None
    if needs_reference:
        reference = _reference(models.reference_folder, settings.model_folder, policy, frozen)
    return Guides(
        ranks,
        every_micro_batch=placement.every_micro_batch,
        reference=reference,
        teacher=frozen(models.teacher_folder, "teacher") if models.teacher_folder else None,
        critic=critic,
        critic_warmup_steps=0 if rule is None else rule.warmup_steps,
        advantages=advantages,
    )


def _reference(folder: str, version_0: str, policy: Policy, frozen: Callable[[str, str], FrozenModel]) -> FrozenModel:
    """The policy without its adapters costs nothing; else a model of its own."""
    base: Callable[[], AbstractContextManager[None]] | None = policy.base()
    if base is not None and not folder:
        return FrozenModel(policy.network, around=base)
    return frozen(folder or version_0, "reference")
