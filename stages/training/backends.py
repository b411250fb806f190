"""The torch backends put together: plain (the whole model on every rank) and FSDP2, with the guides that a run asks for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec
import torch

from stages.training.critic import Critic, CriticSettings
from stages.training.errors import TrainingError
from stages.training.fsdp2_placement import DType, Fsdp2Placement, Fsdp2Settings, lone_group
from stages.training.guides import Guides
from stages.training.lora import LoraSettings
from stages.training.networks import FrozenModel, read_critic, read_frozen
from stages.training.passes import Passes, WholePasses
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
    passes = WholePasses(policy.network, every_micro_batch=placement.every_micro_batch)

    def critic(rule: CriticSettings) -> Critic:
        model = read_critic(
            rule.folder or settings.model_folder,
            getattr(torch, models.dtype),
            ranks.device,
            placement,
            recompute=models.activation_checkpointing,
        )
        passes = WholePasses(model.network, every_micro_batch=placement.every_micro_batch)
        return Critic(model, rule, placement, passes)

    guides = make_guides(settings, models, ranks, placement, policy, passes, critic)
    return StepBackend(settings, plan, ranks, policy, placement, guides, passes)


def make_guides(
    settings: StepSettings,
    models: ModelSettings,
    ranks: Ranks,
    placement: Placement,
    policy: Policy,
    passes: Passes,
    make_critic: Callable[[CriticSettings], Critic],
) -> Guides:
    """Those that the settings need.

    Args:
        settings: the step's.
        models: which ones.
        ranks: those among which rows are dealt.
        placement: how frozen models lie over the ranks.
        policy: what is trained.
        passes: how micro-batches go through it.
        make_critic: the backend's critic.

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

    reference = None
    if needs_reference:
        base = policy.base()
        if base is not None and not models.reference_folder:  # the policy without its adapters costs nothing
            reference = FrozenModel(passes, around=base)
        else:
            reference = frozen(models.reference_folder or settings.model_folder, "reference")
    return Guides(
        ranks,
        reference=reference,
        teacher=frozen(models.teacher_folder, "teacher") if models.teacher_folder else None,
        critic=None if models.critic is None else make_critic(models.critic),
        critic_warmup_steps=0 if models.critic is None else models.critic.warmup_steps,
        advantages=advantages,
    )
