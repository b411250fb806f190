"""Causal attention over a pack of rows: no row sees another, and padding never reaches the model.

The portable way: rows of similar length are gathered into a small padded batch for attention alone (a causal row never looks
right, so the padding changes nothing), one kernel call for each bucket; a row that is alone goes as it is. Shapes: see the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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


class PackLayout(msgspec.Struct, frozen=True):
    """Where the rows of a pack lie."""

    cu_seqlens: Tensor
    """[R+1] int32, on the model's device."""
    position_ids_1T: Tensor
    buckets: tuple[Bucket, ...]
    restore_T: Tensor | None
    """Index of each token among the buckets' outputs; None where the pack is one row."""


def pack_layout(lengths: Sequence[int], device: torch.device) -> PackLayout:
    """Lay out rows of these lengths (each at least 1; no rows at all are an empty pack)."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    positions = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(n) for n in lengths)])[None].to(device)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    if len(lengths) == 1:
        return PackLayout(cu_seqlens, positions, (), None)
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
        buckets.append(Bucket(len(rows), width, gather.flatten().to(device)))
        offset += len(rows) * width
    return PackLayout(cu_seqlens, positions, tuple(buckets), restore.to(device))


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
    grouped = query.shape[1] != key.shape[1]
    if packed.restore_T is None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return mixed.transpose(1, 2).contiguous(), None
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs: list[Tensor] = []
    for bucket in packed.buckets:
        q, k, v = (
            tensor.index_select(0, bucket.gather).view(bucket.num_rows, bucket.width, *tensor.shape[1:]).transpose(1, 2)
            for tensor in rows
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed.restore_T)[None], None


def register() -> None:
    """Make the attention known to transformers; the caller does so once, before it builds a model."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
