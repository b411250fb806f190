"""The Megatron-Core backend: pipeline × data × tensor parallel ranks. Run here on CPU over gloo; over NCCL it is written and was not run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.device_mesh import init_device_mesh

from stages.training.backends import ModelSettings, make_guides
from stages.training.critic import Critic, CriticSettings
from stages.training.errors import TrainingError
from stages.training.fsdp2_placement import lone_group
from stages.training.megatron.cpu_shim import CudaMeansCpu, megatron_on_cpu
from stages.training.megatron.forward import MegatronForward
from stages.training.megatron.groups import Division, GroupRanks, Groups
from stages.training.megatron.pipeline import PipelinedPasses, Stages
from stages.training.megatron.placement import MegatronPlacement
from stages.training.megatron.policy import MegatronCritic, MegatronPolicy
from stages.training.passes import Passes, WholePasses
from stages.training.ranks import Ranks
from stages.training.step_backend import Plan, StepBackend, StepSettings


class MegatronSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks share a model. What is left of them is data-parallel."""

    tensor_parallel: int = 1
    """Ranks that divide each matrix."""
    pipeline_parallel: int = 1
    """Stages that divide the layers."""


@contextmanager
def open_megatron_backend(
    settings: StepSettings, models: ModelSettings, plan: Plan, ranks: Ranks, megatron: MegatronSettings
) -> Generator[StepBackend]:
    """One rank.

    Raises:
        TrainingError: ranks or model can't be divided so, or a model that this backend lacks.
    """
    together = megatron.tensor_parallel * megatron.pipeline_parallel
    if ranks.world_size % together:
        raise TrainingError(
            f"training.ranks = {ranks.world_size} is no multiple of training.megatron.tensor_parallel · pipeline_parallel = "
            f"{megatron.tensor_parallel} · {megatron.pipeline_parallel}"
        )
    on_cpu = ranks.device.type == "cpu"
    with lone_group(), megatron_on_cpu() if on_cpu else nullcontext():
        parallel_state.initialize_model_parallel(megatron.tensor_parallel, megatron.pipeline_parallel)
        try:
            with CudaMeansCpu() if on_cpu else nullcontext():
                backend = _backend(settings, models, plan, ranks, megatron)
            try:
                yield backend
            finally:
                backend.close()
        finally:
            parallel_state.destroy_model_parallel()


def _backend(
    settings: StepSettings, models: ModelSettings, plan: Plan, ranks: Ranks, megatron: MegatronSettings
) -> StepBackend:
    stages, tensor = megatron.pipeline_parallel, megatron.tensor_parallel
    # Megatron's order: tensor-parallel ranks are neighbours, stages are far apart
    mesh = init_device_mesh(
        ranks.device.type,
        (stages, ranks.world_size // (stages * tensor), tensor),
        mesh_dim_names=("pipeline", "data", "tensor"),
    )
    pipeline = _group(parallel_state.get_pipeline_model_parallel_group())
    ends = parallel_state.get_embedding_group(check_initialized=False)
    groups = Groups(
        data=GroupRanks(_group(parallel_state.get_data_parallel_group()), ranks.device),
        tensor=GroupRanks(_group(parallel_state.get_tensor_model_parallel_group()), ranks.device),
        stages=GroupRanks(pipeline, ranks.device),
        ends=GroupRanks(ends, ranks.device) if isinstance(ends, dist.ProcessGroup) else None,
    )
    division = Division(mesh, Stages(pipeline, ranks.device))
    dtype: torch.dtype = getattr(torch, models.dtype)
    recompute = models.activation_checkpointing

    def passes_of(network: MegatronForward, placement: MegatronPlacement) -> Passes:
        if stages == 1:
            return WholePasses(network, every_micro_batch=placement.every_micro_batch)
        around = CudaMeansCpu if ranks.device.type == "cpu" else nullcontext
        return PipelinedPasses(network, division.stages, around)

    def make_critic(rule: CriticSettings) -> Critic:
        model = MegatronCritic(
            rule.folder or settings.model_folder, division, dtype=dtype, device=ranks.device, recompute=recompute
        )
        placement = MegatronPlacement(ranks.device, groups, model)
        return Critic(model, rule, placement, passes_of(model.network, placement))

    policy = MegatronPolicy(
        settings.model_folder, division, dtype=dtype, device=ranks.device, recompute=recompute, lora=models.lora
    )
    placement = MegatronPlacement(ranks.device, groups, policy)
    passes = passes_of(policy.network, placement)
    guides = make_guides(settings, models, groups.data, placement, policy, passes, make_critic)
    return StepBackend(settings, plan, ranks, policy, placement, guides, passes, data_ranks=groups.data)


def _group(group: object) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise TrainingError("Megatron-Core made no process group for this rank")
    return group
