"""Causal attention over a pack of rows: no row sees another, and padding never reaches the model.

The portable way: rows of similar length are gathered into a small padded batch for attention alone (a causal row never looks
right, so the padding changes nothing), one kernel call for each bucket; a row that is alone goes as it is. On CUDA in half precision
torch's variable-length kernel takes the pack as it lies (written, not run here). Shapes: see the room; H and K heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

PACKED_ATTENTION: Final = "headrace_packed"
"""The name under which transformers finds this attention."""
_SPREAD: Final = 1.25
_SLACK_TOKENS: Final = 16
"""A bucket's longest row is at most `_SPREAD` times its shortest plus `_SLACK_TOKENS`: bounds the padded work."""


class Bucket(msgspec.Struct, frozen=True):
    """Rows that attend in one call."""

    num_rows: int
    width: int
    gather: Tensor
    """[num_rows·width] index into the pack; padding repeats the row's last token."""
    start: int
    """Where its first row begins: a row that is alone needs no gathering."""


class PackLayout(msgspec.Struct, frozen=True):
    """Where the rows of a pack lie."""

    cu_seqlens: Tensor
    """[R+1] int32, on the model's device."""
    position_ids_1T: Tensor
    buckets: tuple[Bucket, ...]
    restore_T: Tensor | None
    """Index of each token among the buckets' outputs; None where the pack is one row."""
    longest: int = 0
    """Tokens of the longest row."""


def pack_layout(lengths: Sequence[int], device: torch.device) -> PackLayout:
    """Lay out rows of these lengths (each at least 1; no rows at all are an empty pack)."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    positions = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(n) for n in lengths)])[None].to(device)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    if len(lengths) == 1:
        return PackLayout(cu_seqlens, positions, (), None, lengths[0])
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[i] <= lengths[groups[-1][0]] * _SPREAD + _SLACK_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    buckets: list[Bucket] = []
    restore = torch.empty(starts[-1], dtype=torch.int64)
    offset = 0
    for rows in groups:
        width = max(lengths[i] for i in rows)
        columns = torch.arange(width)
        gather = torch.stack([starts[i] + columns.clamp(max=lengths[i] - 1) for i in rows])
        for place, i in enumerate(rows):
            begin = offset + place * width
            restore[starts[i] : starts[i + 1]] = torch.arange(begin, begin + lengths[i])
        buckets.append(Bucket(len(rows), width, gather.flatten().to(device), starts[rows[0]]))
        offset += len(rows) * width
    return PackLayout(cu_seqlens, positions, tuple(buckets), restore.to(device), max(lengths, default=0))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed: PackLayout | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """The form that transformers calls: query [1, H, T, E], key and value [1, K, T, E] → [1, T, H, E].

    Raises:
        ValueError: The model was called without a layout, or with a mask of its own.
    """
    if packed is None or attention_mask is not None:
        raise ValueError(f"{type(module).__name__}: packed attention needs `packed` and takes no attention mask")
    if _kernel_takes(query):
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - CUDA only

        return varlen_attention(query, key, value, packed, scaling, varlen_attn), None
    if packed.restore_T is None:
        return _attend(query, key, value, scaling).transpose(1, 2).contiguous(), None
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs: list[Tensor] = []
    for bucket in packed.buckets:
        q, k, v = (_batched(tensor, bucket) for tensor in rows)
        outputs.append(_attend(q, k, v, scaling).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed.restore_T)[None], None


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackLayout,
    scaling: float | None,
    kernel: Callable[..., Any],  # torch's may give more than a tensor, if asked
) -> Tensor:
    """By a kernel that takes packs: the same arguments and result as `packed_attention`, nothing gathered and nothing padded."""
    q_THE, k_TKE, v_TKE = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    mixed_THE: Tensor = kernel(
        q_THE,
        k_TKE,
        v_TKE,
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.longest,
        packed.longest,
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=q_THE.shape[1] != k_TKE.shape[1],
    )
    return mixed_THE[None]


def _kernel_takes(query: Tensor) -> bool:
    """Its backward pass adds in any order, so a run that must repeat bit for bit goes the portable way."""
    return (
        query.is_cuda
        and query.dtype in {torch.float16, torch.bfloat16}
        and not torch.are_deterministic_algorithms_enabled()
    )


def _batched(tensor_THE: Tensor, bucket: Bucket) -> Tensor:
    """A bucket's rows as a padded batch: [rows, H, width, E]."""
    if bucket.num_rows == 1:
        return tensor_THE[bucket.start : bucket.start + bucket.width].transpose(0, 1)[None]
    gathered = tensor_THE.index_select(0, bucket.gather)
    return gathered.view(bucket.num_rows, bucket.width, *tensor_THE.shape[1:]).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)


def register() -> None:
    """Make the attention known to transformers; the caller does so once, before it builds a model."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
