"""Qwen3 weights between the names and layouts of HF and Megatron-Core, and their parts among tensor- and pipeline-parallel ranks.

    HF whole ─ of_stage, shard ─▶ HF part of a rank ◀─ names, fused matrices ─▶ Megatron parameters of a rank

Megatron numbers a stage's layers from 0; where input and output matrix are tied, the last stage has a copy of the embedding as its
output matrix, and both go by the embedding's HF name. Megatron fuses q, k, v (for each key head: its query heads, the key, the value) and gate over up; low-rank
adapters stand beside the fused matrices one for each HF projection. Pure; knows no process group.
Shapes: D hidden, V vocabulary, E head size, K key heads of the rank, G query heads a key head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec
import torch
from torch import Tensor

_EMBEDDING: Final = "model.embed_tokens.weight"
_OUTPUT: Final = "lm_head.weight"
_MEGATRON_OUTPUT: Final = "output_layer.weight"
_PLAIN: Final = {
    "embedding.word_embeddings.weight": _EMBEDDING,
    _MEGATRON_OUTPUT: _OUTPUT,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "value_head.weight": "value_head.weight",
    "value_head.bias": "value_head.bias",
}
_IN_LAYER: Final = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV: Final = "self_attention.linear_qkv.weight"
_GATE_UP: Final = "mlp.linear_fc1.weight"
_JOINED: Final = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight")
"""They come along with the first of their fused matrix."""
_LAYER: Final = re.compile(r"(?:decoder|model)\.layers\.(\d+)\.(.+)")
PROJECTIONS: Final = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "mlp.linear_fc1": ("gate_proj", "up_proj"),
    "mlp.linear_fc2": ("down_proj",),
}
"""Megatron's matrices and the HF projections in each, in order."""
ROW_PARALLEL: Final = ("o_proj", "down_proj")
"""Projections whose inputs, not outputs, are divided among tensor-parallel ranks."""
_BLOCK: Final = {"self_attention": "self_attn", "mlp": "mlp"}
_ADAPTER: Final = re.compile(r"(self_attention|mlp)\.\w+\.adapters\.(\w+)\.(lora_[AB])")
_HF_ADAPTER: Final = re.compile(r"(?:self_attn|mlp)\.(\w+)\.(lora_[AB])\.weight")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of the model a pipeline stage has."""

    first_layer: int
    num_layers: int
    is_first: bool
    """Has the embedding."""
    is_last: bool
    """Has the last norm and the output matrix."""
    is_tied: bool
    """The output matrix is the embedding."""

    @staticmethod
    def of(rank: int, num_stages: int, *, num_layers: int, is_tied: bool) -> Stage:
        """An even share of the layers."""
        share = num_layers // num_stages
        return Stage(
            first_layer=rank * share,
            num_layers=share,
            is_first=rank == 0,
            is_last=rank == num_stages - 1,
            is_tied=is_tied,
        )

    @property
    def has_embedding_copy(self) -> bool:
        """The embedding lies here a second time."""
        return self.is_tied and self.is_last and not self.is_first


WHOLE: Final = Stage(first_layer=0, num_layers=1 << 30, is_first=True, is_last=True, is_tied=True)
"""No pipeline."""


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """Attention heads of one rank."""

    num_kv_heads: int
    head_size: int


def hf_from_megatron(parameters: Mapping[str, Tensor], heads: Heads, stage: Stage = WHOLE) -> dict[str, Tensor]:
    """A rank's parameters under HF names; copies where matrices are fused.

    Raises:
        KeyError: a parameter that HF's Qwen3 doesn't have.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            is_copy = name == _MEGATRON_OUTPUT and stage.has_embedding_copy
            found[_EMBEDDING if is_copy else _PLAIN[name]] = tensor
            continue
        prefix, inner = f"model.layers.{int(match[1]) + stage.first_layer}.", match[2]
        if inner == _QKV:
            q, k, v = _split_qkv(tensor, heads)
            found |= {
                f"{prefix}self_attn.{letter}_proj.weight": part for letter, part in zip("qkv", (q, k, v), strict=True)
            }
        elif inner == _GATE_UP:
            gate, up = tensor.chunk(2)
            found |= {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}
        elif (adapter := _ADAPTER.fullmatch(inner)) is not None:
            found[f"{prefix}{_BLOCK[adapter[1]]}.{adapter[2]}.{adapter[3]}.weight"] = tensor
        else:
            found[prefix + _IN_LAYER[inner]] = tensor
    return found


def megatron_from_hf(weights: Mapping[str, Tensor], heads: Heads, stage: Stage = WHOLE) -> dict[str, Tensor]:
    """The inverse: a rank's HF parts as Megatron's parameters.

    Raises:
        KeyError: a weight that Megatron's Qwen3 doesn't have.
    """
    plain = {hf: megatron for megatron, hf in _PLAIN.items()}
    if stage.has_embedding_copy:
        plain[_EMBEDDING] = _MEGATRON_OUTPUT
    inner_names = {hf: megatron for megatron, hf in _IN_LAYER.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            found[plain[name]] = tensor
            continue
        source, inner = f"model.layers.{match[1]}.", match[2]
        target = f"decoder.layers.{int(match[1]) - stage.first_layer}."
        if inner in inner_names:
            found[target + inner_names[inner]] = tensor
        elif inner == "self_attn.q_proj.weight":
            q, k, v = (weights[f"{source}self_attn.{letter}_proj.weight"] for letter in "qkv")
            found[target + _QKV] = _join_qkv(q, k, v, heads)
        elif inner == "mlp.gate_proj.weight":
            found[target + _GATE_UP] = torch.cat([tensor, weights[f"{source}mlp.up_proj.weight"]])
        elif (adapter := _HF_ADAPTER.fullmatch(inner)) is not None:
            matrix = next(name for name, projections in PROJECTIONS.items() if adapter[1] in projections)
            found[f"{target}{matrix}.adapters.{adapter[1]}.{adapter[2]}"] = tensor
        elif inner not in _JOINED:
            raise KeyError(name)
    return found


def projection_name(layer: int, matrix: str, projection: str) -> str:
    """The HF module of a projection in one of `PROJECTIONS`' matrices, by the layer's number in the whole model."""
    return f"model.layers.{layer}.{_BLOCK[matrix.partition('.')[0]]}.{projection}"


def of_stage(weights: Mapping[str, Tensor], stage: Stage) -> dict[str, Tensor]:
    """The HF weights that a pipeline stage has."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        if match is not None:
            is_here = stage.first_layer <= int(match[1]) < stage.first_layer + stage.num_layers
        elif name == _EMBEDDING:
            is_here = stage.is_first or stage.has_embedding_copy
        else:
            is_here = stage.is_last
        if is_here:
            found[name] = tensor
    return found


def sharded_dimension(hf_name: str) -> int | None:
    """Along which a weight is divided among tensor-parallel ranks; None: every rank has it whole."""
    adapter = re.fullmatch(r".+\.(\w+)\.lora_([AB])\.weight", hf_name)
    if adapter is not None:  # the small side is whole everywhere
        is_row_parallel = adapter[1] in ROW_PARALLEL
        if adapter[2] == "A":
            return 1 if is_row_parallel else None
        return None if is_row_parallel else 0
    if hf_name.endswith(tuple(f"{name}.weight" for name in ROW_PARALLEL)):
        return 1
    if hf_name.endswith("norm.weight") or hf_name.startswith("value_head."):
        return None
    return 0


def pad_vocabulary(tensor: Tensor, hf_name: str, padded: int) -> Tensor:
    """Rows of zeros below an embedding or an output matrix, so that every rank gets as many."""
    if hf_name not in {_EMBEDDING, _OUTPUT} or tensor.shape[0] == padded:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(padded - tensor.shape[0], tensor.shape[1])])


def unpad_vocabulary(tensor: Tensor, hf_name: str, vocabulary: int) -> Tensor:
    """Without them."""
    return tensor[:vocabulary] if hf_name in {_EMBEDDING, _OUTPUT} else tensor


def shard(tensor: Tensor, hf_name: str, rank: int, num_ranks: int) -> Tensor:
    """A rank's part of a whole weight."""
    dimension = sharded_dimension(hf_name)
    return tensor if dimension is None else tensor.chunk(num_ranks, dimension)[rank]


def _split_qkv(fused: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    rows_KGE = fused.view(heads.num_kv_heads, -1, heads.head_size, fused.shape[-1])
    q, k, v = rows_KGE[:, :-2], rows_KGE[:, -2:-1], rows_KGE[:, -1:]
    return (q.reshape(-1, fused.shape[-1]), k.reshape(-1, fused.shape[-1]), v.reshape(-1, fused.shape[-1]))


def _join_qkv(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    parts = [part.view(heads.num_kv_heads, -1, heads.head_size, part.shape[-1]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, q.shape[-1])
