"""A Qwen3 of Megatron-Core's layers, or a pipeline stage of one, and the policy's forward over packs.

Rows of a pack keep their own positions, and attention is headrace's packed attention: Megatron's local attention would build a
T × T matrix and knows one sequence only. Shapes: T tokens of a pack, N trained tokens, D hidden size, H heads, E head size.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu

from stages.learning.attention import PackLayout, packed_attention
from stages.training.errors import TrainingError
from stages.training.megatron.convert import Stage
from stages.training.megatron.vocab_parallel import VocabularyPart, parallel_logprobs

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
    rope_parameters: dict[str, Any] = {}
    """Of newer folders: rope_theta and rope_type."""

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding with padding."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def theta(self) -> float:
        """Base of the rotary frequencies."""
        return float(self.rope_parameters.get("rope_theta", self.rope_theta))


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


class MegatronForward(nn.Module):
    """This rank's part of the way from a pack to log-probs: all of it, or one stage of a pipeline.

    Megatron's schedules find `config`, `model_type` and `set_input_tensor` here.
    """

    def __init__(self, model: GPTModel, shape: Shape) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.model_type = model.model_type
        group = cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())
        size = shape.padded_vocabulary // group.size()
        self._pad_token_id = shape.pad_token_id
        self._part = VocabularyPart(group, first=group.rank() * size, size=size, vocabulary=shape.vocab_size)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        self._inverse_frequencies = 1.0 / shape.theta**exponents

    def set_input_tensor(self, hidden_T1D: list[Tensor | None]) -> None:
        """What the stage before sent."""
        cast("Any", self.model).set_input_tensor(hidden_T1D)

    def forward(
        self, tokens_T: Tensor, layout: PackLayout, target_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Log-probs and entropies [N] of the tokens at pack positions `target_N`, each given its row before it; on a stage that
        isn't the last, the hidden states [T, 1, D] for the next.
        """
        model = cast("Any", self.model)  # Megatron's modules are untyped
        hidden_T1D = self._embedded(tokens_T) if model.pre_process else None
        angles_TE = torch.outer(
            layout.position_ids_1T[0].float(), self._inverse_frequencies.to(layout.position_ids_1T.device)
        )
        rotary_T11E = torch.cat([angles_TE, angles_TE], dim=-1)[:, None, None, :]
        hidden_T1D = model.decoder(hidden_states=hidden_T1D, attention_mask=layout, rotary_pos_emb=rotary_T11E)
        if not model.post_process:
            return hidden_T1D
        weight_VD = (
            model.shared_embedding_or_output_weight()
            if model.share_embeddings_and_output_weights
            else model.output_layer.weight
        )
        hidden_ND = copy_to_tensor_model_parallel_region(hidden_T1D[:, 0][target_N - 1])
        return parallel_logprobs(hidden_ND, weight_VD, tokens_T[target_N], temperature, self._part)

    def _embedded(self, tokens_T: Tensor) -> Tensor:
        hidden_T1D: Tensor = cast("Any", self.model).embedding(input_ids=tokens_T[None], position_ids=None)
        if self._pad_token_id is None:
            return hidden_T1D
        is_pad_T11 = (tokens_T == self._pad_token_id)[:, None, None]
        return torch.where(is_pad_T11, hidden_T1D.detach(), hidden_T1D)


def build_model(
    shape: Shape,
    stage: Stage,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
) -> GPTModel:
    """A stage's part of the model with weights yet to be loaded.

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
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="none",
    )
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
    kind = shape.rope_parameters.get("rope_type", "default")
    if kind != "default":
        raise TrainingError(f"backend megatron knows rope_type default, found {kind}: use backend = fsdp2")
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
