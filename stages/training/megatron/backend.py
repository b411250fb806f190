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
from stages.training.errors import TrainingError
from stages.training.fsdp2_placement import lone_group
from stages.training.megatron.cpu_shim import CudaMeansCpu, megatron_on_cpu
from stages.training.megatron.pipeline import PipelinedPasses, Stages
from stages.training.megatron.policy import GroupRanks, Groups, MegatronPlacement, MegatronPolicy
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
        TrainingError: ranks or model can't be divided so, or a setting that this backend lacks.
    """
    if models.critic is not None or models.lora is not None or models.activation_checkpointing:
        raise TrainingError(
            "backend megatron has no critic, no adapters and no activation checkpointing: use backend = fsdp2"
        )
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
    policy = MegatronPolicy(
        settings.model_folder,
        mesh,
        Stages(pipeline, ranks.device),
        dtype=getattr(torch, models.dtype),
        device=ranks.device,
    )
    placement = MegatronPlacement(ranks.device, groups, policy)
    passes = None
    if stages > 1:
        around = CudaMeansCpu if ranks.device.type == "cpu" else nullcontext
        passes = PipelinedPasses(policy.network, Stages(pipeline, ranks.device), around)
    guides = make_guides(settings, models, groups.data, placement, policy)
    return StepBackend(settings, plan, ranks, policy, placement, guides, data_ranks=groups.data, passes=passes)


def _group(group: object) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise TrainingError("Megatron-Core made no process group for this rank")
    return group
