"""A Qwen3 of Megatron-Core's layers, or a pipeline stage of one.

Attention is headrace's packed attention: Megatron's local attention would build a T × T matrix and knows one sequence only.
Shapes: T tokens of a pack, H heads, E head size.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from stages.learning.attention import PackLayout, packed_attention
from stages.training.errors import TrainingError
from stages.training.megatron.convert import Stage

VOCABULARY_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, whatever the ranks, so that checkpoints fit any number of them."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a Qwen3's config.json says."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    """Its embedding learns nothing as an input, as in transformers."""
    model_type: str = "qwen3"
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] | None = None
    """Of newer folders: rope_theta and rope_type."""
    rope_scaling: dict[str, Any] | None = None
    """Of older folders: None is the plain rotary embedding."""
    attention_bias: bool = False
    use_sliding_window: bool = False
    hidden_act: str = "silu"

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding with padding."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def theta(self) -> float:
        """Base of the rotary frequencies."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta))

    @property
    def rope_type(self) -> str:
        """How positions are scaled; "default": not at all."""
        rope = self.rope_parameters or self.rope_scaling or {}
        return str(rope.get("rope_type") or rope.get("type") or "default")


def read_shape(folder: str) -> Shape:
    """Of a HF folder.

    Raises:
        TrainingError: no config.json of a Qwen3.
    """
    try:
        return msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=Shape)
    except (OSError, msgspec.MsgspecError) as error:
        raise TrainingError(f"{folder}: expected the config.json of a Qwen3: {error}") from error


class PackedCoreAttention(nn.Module):
    """Stands where Megatron's layers have their core attention; the layout comes as the attention mask."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_unused: object) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: PackLayout, **_unused: object
    ) -> Tensor:
        """[T, 1, H, E] each → [T, 1, H·E]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed, _ = packed_attention(self, q, k, v, None, packed=attention_mask)
        return mixed.transpose(0, 1).flatten(2)


def build_model(
    shape: Shape,
    stage: Stage,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    recompute: bool = False,
) -> GPTModel:
    """A stage's part of the model with weights yet to be loaded.

    Args:
        shape: of the whole model.
        stage: which part.
        dtype: of the weights.
        device: where they lie.
        tensor_parallel: ranks that share each matrix.
        pipeline_parallel: stages that share the layers.
        recompute: compute each layer's activations again in the backward pass.

    Raises:
        TrainingError: a model that these layers can't be.
    """
    check_shape(shape, tensor_parallel, pipeline_parallel)
    config = TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no password; the default refuses packs of any length, experts or not
        variable_seq_lengths=True,  # packs differ in length: each sends its shape ahead
        batch_p2p_sync=False,
        calculate_per_token_loss=True,  # weights are global: no division by the number of micro-batches
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        # fused kernels need CUDA extensions that Megatron-Core doesn't bring
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")  # specs are untyped
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.padded_vocabulary,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=stage.is_first,
        post_process=stage.is_last,
        share_embeddings_and_output_weights=stage.is_tied,
        position_embedding_type="none",
    )
    if recompute:
        for layer in model.decoder.layers:
            # Megatron's own takes tensors only, and the layout is none
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model.to(device)


def check_shape(shape: Shape, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Refuse what can't be divided or isn't a Qwen3.

    Raises:
        TrainingError: says what.
    """
    if shape.model_type != "qwen3":
        raise TrainingError(
            f"backend megatron converts weights of model_type qwen3, found {shape.model_type}: use backend = fsdp2"
        )
    for name, known, found in (
        ("rope_type", "default", shape.rope_type),
        ("attention_bias", False, shape.attention_bias),
        ("use_sliding_window", False, shape.use_sliding_window),
        ("hidden_act", "silu", shape.hidden_act),
    ):
        if found != known:
            raise TrainingError(f"backend megatron knows {name} {known}, found {found}: use backend = fsdp2")
    for name, value in (
        ("num_attention_heads", shape.num_attention_heads),
        ("num_key_value_heads", shape.num_key_value_heads),
        ("intermediate_size", shape.intermediate_size),
        ("padded vocabulary", shape.padded_vocabulary),
    ):
        if value % tensor_parallel:
            raise TrainingError(
                f"training.megatron.tensor_parallel = {tensor_parallel} doesn't divide the model's {name} ({value})"
            )
    if shape.num_hidden_layers % pipeline_parallel:
        raise TrainingError(
            f"training.megatron.pipeline_parallel = {pipeline_parallel} doesn't divide the model's num_hidden_layers "
            f"({shape.num_hidden_layers}): stages get equally many"
        )
