"""The Megatron-Core backend: tensor × data parallel ranks. Run here on CPU over gloo; over NCCL it is written and was not run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.device_mesh import init_device_mesh

from stages.training.backends import ModelSettings, make_guides
from stages.training.errors import TrainingError
from stages.training.fsdp2_placement import lone_group
from stages.training.megatron.cpu_shim import megatron_on_cpu
from stages.training.megatron.policy import GroupRanks, MegatronPlacement, MegatronPolicy
from stages.training.ranks import Ranks
from stages.training.step_backend import Plan, StepBackend, StepSettings


@contextmanager
def open_megatron_backend(
    settings: StepSettings, models: ModelSettings, plan: Plan, ranks: Ranks, *, tensor_parallel: int
) -> Generator[StepBackend]:
    """One rank.

    Raises:
        TrainingError: ranks or model can't be divided so, or a setting that this backend lacks.
    """
    if models.critic is not None or models.lora is not None or models.activation_checkpointing:
        raise TrainingError(
            "backend megatron has no critic, no adapters and no activation checkpointing: use backend = fsdp2"
        )
    if ranks.world_size % tensor_parallel:
        raise TrainingError(
            f"training.ranks = {ranks.world_size} is no multiple of training.megatron.tensor_parallel = {tensor_parallel}"
        )
    with lone_group():
        on_cpu = ranks.device.type == "cpu"
        with megatron_on_cpu() if on_cpu else nullcontext():
            parallel_state.initialize_model_parallel(tensor_parallel)
            try:
                backend = _backend(settings, models, plan, ranks, tensor_parallel)
                try:
                    yield backend
                finally:
                    backend.close()
            finally:
                parallel_state.destroy_model_parallel()


def _backend(
    settings: StepSettings, models: ModelSettings, plan: Plan, ranks: Ranks, tensor_parallel: int
) -> StepBackend:
    data_parallel = ranks.world_size // tensor_parallel
    # Megatron's order: tensor-parallel ranks are neighbours
    mesh = init_device_mesh(ranks.device.type, (data_parallel, tensor_parallel), mesh_dim_names=("data", "tensor"))
    policy = MegatronPolicy(settings.model_folder, mesh, dtype=getattr(torch, models.dtype), device=ranks.device)
    data, tensor = (
        GroupRanks(_group(group), ranks.device)
        for group in (parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group())
    )
    placement = MegatronPlacement(ranks.device, data, tensor, policy)
    guides = make_guides(settings, models, data, placement, policy)
    return StepBackend(settings, plan, ranks, policy, placement, guides, data_ranks=data)


def _group(group: object) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise TrainingError("Megatron-Core made no process group for this rank")
    return group
