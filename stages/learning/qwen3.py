"""Inference forward of the Qwen3 architecture over a slot-based KV cache, straight from a state dict.

A small model spends its time in per-call overhead: projections are fused, the cache is written in place, and running
requests sit in adjacent slots so that attention reads views. Equal to transformers' Qwen3 within rounding.
Shapes: see the room's docstring.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F


class ShapeError(Exception):
    """A configuration or a state dict is not a Qwen3 that this forward computes."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the forward needs of a HF config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_context: int
    tied: bool
    """The output matrix is the embedding."""


def shape_from_config(config: Mapping[str, object]) -> ModelShape:
    """Read a HF config.

    Raises:
        ShapeError: Another architecture, or a variant (scaled rotary, sliding window, biases) that is not computed here.
    """
    if config.get("model_type") != "qwen3":
        raise ShapeError(f"expected model_type 'qwen3', found {config.get('model_type')!r}: use vLLM or SGLang for it")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {}
    if (
        rope.get("rope_type", "default") != "default"
        or config.get("use_sliding_window")
        or config.get("attention_bias")
    ):
        raise ShapeError("expected plain rotary embedding, no sliding window and no attention bias")
    names = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps",
        "max_context": "max_position_embeddings",
        "tied": "tie_word_embeddings",
    }
    values = {field: config.get(names.get(field, field)) for field in ModelShape.__struct_fields__}
    values["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    try:
        return msgspec.convert(values, ModelShape, strict=False)
    except msgspec.ValidationError as error:
        raise ShapeError(f"config.json is no complete Qwen3 configuration: {error}") from error


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state dict, as transformers writes it."""
    d, e = shape.hidden_size, shape.head_dim
    q, kv, f = shape.num_heads * e, shape.num_kv_heads * e, shape.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, d),
        "model.norm.weight": (d,),
    }
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocab_size, d)
    for i in range(shape.num_layers):
        layer = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "self_attn.q_norm": (e,),
            "self_attn.k_norm": (e,),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
    return tensors


def check_tensors(shape: ModelShape, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ShapeError unless names and shapes are complete and right (a tied lm_head may be there)."""
    expected = expected_tensors(shape)
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys() - {"lm_head.weight"})
    if missing or extra:
        raise ShapeError(
            f"weights don't fit: missing {missing[:3]} ({len(missing)}), unknown {extra[:3]} ({len(extra)})"
        )
    for name, size in expected.items():
        if tuple(found[name]) != size:
            raise ShapeError(f"weights don't fit: {name} has shape {tuple(found[name])}, expected {size}")


class _Layer(msgspec.Struct, frozen=True):
    norm_attn_D: Tensor
    qkv: Tensor
    """[(H+2K)·E, D]"""
    norm_qk: Tensor
    """[H+K, E]: the q norm for query heads, the k norm for key heads."""
    out: Tensor
    norm_mlp_D: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(msgspec.Struct, frozen=True):
    """A state dict, fused for inference."""

    shape: ModelShape
    embed_VD: Tensor
    layers: tuple[_Layer, ...]
    norm_D: Tensor
    head_VD: Tensor


def fuse(shape: ModelShape, state: Mapping[str, Tensor]) -> Weights:
    """Copy a HF state dict into the fused form, float32.

    Raises:
        ShapeError: Names or shapes don't fit.
    """
    check_tensors(shape, {name: tuple(tensor.shape) for name, tensor in state.items()})

    def get(name: str) -> Tensor:
        return state[f"{name}.weight"].detach().to(torch.float32)

    layers: list[_Layer] = []
    for i in range(shape.num_layers):
        at = f"model.layers.{i}"
        heads = [get(f"{at}.self_attn.q_norm").expand(shape.num_heads, -1)]
        heads.append(get(f"{at}.self_attn.k_norm").expand(shape.num_kv_heads, -1))
        layers.append(
            _Layer(
                get(f"{at}.input_layernorm").clone(),
                torch.cat([get(f"{at}.self_attn.{x}_proj") for x in "qkv"]),
                torch.cat(heads),
                get(f"{at}.self_attn.o_proj").clone(),
                get(f"{at}.post_attention_layernorm").clone(),
                torch.cat([get(f"{at}.mlp.gate_proj"), get(f"{at}.mlp.up_proj")]),
                get(f"{at}.mlp.down_proj").clone(),
            )
        )
    embed = get("model.embed_tokens").clone()
    head = embed if shape.tied else get("lm_head").clone()
    return Weights(shape, embed, tuple(layers), get("model.norm").clone(), head)


class KvCache:
    """Keys and values of all slots. Capacity (positions per slot) grows by doubling, never above what is asked for twice."""

    def __init__(self, shape: ModelShape, num_slots: int, capacity: int = 128) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.capacity = 0
        self.keys: list[Tensor] = [torch.empty(num_slots, shape.num_kv_heads, 0, shape.head_dim)] * shape.num_layers
        self.values = list(self.keys)
        self.reserve(capacity)

    def reserve(self, num_positions: int) -> None:
        """Make room for at least `num_positions` per slot, keeping what is there."""
        if num_positions <= self.capacity:
            return
        grown = max(num_positions, 2 * self.capacity)
        for store in (self.keys, self.values):
            for i, old in enumerate(store):
                new = torch.zeros(self.num_slots, self.shape.num_kv_heads, grown, self.shape.head_dim)
                new[:, :, : self.capacity] = old
                store[i] = new
        self.capacity = grown
        self.cos_LE, self.sin_LE = _rotary(self.shape, grown)
        self.positions_L = torch.arange(grown)

    def move(self, source: int, target: int, num_positions: int) -> None:
        """Copy a slot's first positions to another slot."""
        for store in (self.keys, self.values):
            for tensor in store:
                tensor[target, :, :num_positions] = tensor[source, :, :num_positions]


def _rotary(shape: ModelShape, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sign-carrying sin, [L, E]: x·cos + roll(x, E/2)·sin is the rotation."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    angles = torch.outer(torch.arange(num_positions).float(), 1.0 / shape.rope_theta**half)
    sin = angles.sin()
    return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-sin, sin], dim=-1)


def forward(weights: Weights, cache: KvCache, ids_BT: Tensor, start_B: Tensor, first_slot: int) -> Tensor:
    """Run T new tokens of B requests that sit in slots `first_slot …`, each after its first `start_B` cached positions.

    Rows shorter than T are padded on the right: what the padding writes lies behind the row's end, is never attended
    from inside it, and is overwritten when the row gets there. Returns the normed hidden states [B, T, D].
    """
    s = weights.shape
    num_rows, num_new = ids_BT.shape
    h, k, e = s.num_heads, s.num_kv_heads, s.head_dim
    length = int(start_B.max()) + num_new
    cache.reserve(length)
    pos_BT = start_B[:, None] + cache.positions_L[:num_new]
    cos = cache.cos_LE[pos_BT].unsqueeze(2)
    sin = cache.sin_LE[pos_BT].unsqueeze(2)
    # [B, 1, T·G, L]: the heads of a group share their keys, so they become queries and nothing is repeated
    seen_BTL = cache.positions_L[:length] <= pos_BT[:, :, None]
    mask = torch.zeros(num_rows, num_new, length).masked_fill_(~seen_BTL, float("-inf"))
    mask = mask.repeat_interleave(h // k, dim=1).unsqueeze(1)
    slots = slice(first_slot, first_slot + num_rows)
    slot_B1 = torch.arange(first_slot, first_slot + num_rows)[:, None]
    x = F.embedding(ids_BT, weights.embed_VD)
    for i, layer in enumerate(weights.layers):
        qkv = F.linear(F.rms_norm(x, (s.hidden_size,), layer.norm_attn_D, s.norm_eps), layer.qkv)
        heads = qkv.view(num_rows, num_new, h + 2 * k, e)
        qk = F.rms_norm(heads[:, :, : h + k], (e,), None, s.norm_eps) * layer.norm_qk
        qk = qk * cos + qk.roll(e // 2, -1) * sin
        cache.keys[i][slot_B1, :, pos_BT] = qk[:, :, h:]
        cache.values[i][slot_B1, :, pos_BT] = heads[:, :, h + k :]
        q = qk[:, :, :h].reshape(num_rows, num_new, k, h // k, e).permute(0, 2, 1, 3, 4).reshape(num_rows, k, -1, e)
        keys, values = cache.keys[i][slots, :, :length], cache.values[i][slots, :, :length]
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        mixed = mixed.view(num_rows, k, num_new, h // k, e).permute(0, 2, 1, 3, 4).reshape(num_rows, num_new, h * e)
        x = x + F.linear(mixed, layer.out)
        gate, up = F.linear(F.rms_norm(x, (s.hidden_size,), layer.norm_mlp_D, s.norm_eps), layer.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    return F.rms_norm(x, (s.hidden_size,), weights.norm_D, s.norm_eps)
