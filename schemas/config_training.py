"""Sections below [training]: how models are held, and what stands beside the policy. Torch-free; what only torch's rooms can
judge is checked there.
"""

from __future__ import annotations

import msgspec


class Fsdp2Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[training.fsdp2]: for backend = fsdp2."""

    compute_dtype: str = "float32"
    """In forward and backward: float32 or bfloat16; the split master copy stays in training.dtype."""
    reduce_dtype: str = "float32"
    """In which gradients are summed over the ranks."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters between forward and backward."""
    cpu_offload: bool = False
    """Master copy, gradients and optimizer in host memory."""


class MegatronSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[training.megatron]: for backend = megatron."""

    tensor_parallel: int = 1
    """Ranks that share each matrix. training.ranks = tensor_parallel · pipeline_parallel · data-parallel ranks."""
    pipeline_parallel: int = 1
    """Stages that share the layers; divides their number."""


class CriticSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[training.critic]: a value model, for estimator gae."""

    enabled: bool = False
    folder: str = ""
    """HF folder that it starts from; empty = the policy's version 0, with a value head of zeros."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    """Steps in which only the critic is trained."""
    form: str = "mse"
    """mse | huber."""
    value_clip: float = 0.2
    """How far a value may move from the one before the step; 0 = no clip."""
    huber_delta: float = 10.0


class LoraSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[training.lora]: low-rank adapters; only they are trained."""

    enabled: bool = False
    rank: int = 16
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    dropout: float = 0.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers, as the model's modules end."""
    publish: str = "auto"
    """What engines get: `adapter` (they put it on version 0), `merged` (whole weights, the adapter beside them), or `auto`:
    the adapter where the engine takes one (the built-in one, and servers that the run starts itself).
    """
