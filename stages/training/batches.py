"""Rows as the tensors of one micro-batch. Shapes: T tokens of the pack, N trained tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schemas.messages.training import Manifest
from stages.learning.attention import PackLayout, pack_layout
from stages.learning.losses.batch import LossBatch
from stages.learning.rows import Rows
from stages.training.errors import TrainingError
from stages.training.ports import RowArrays


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A pack, ready for forward and loss. An empty one has no rows and contributes nothing."""

    tokens_T: Tensor
    layout: PackLayout
    target_N: Tensor
    """Pack positions of the trained tokens."""
    weight_T: Tensor
    """float32: each token's row weight."""
    loss: LossBatch


def micro_batch(
    manifest: Manifest, rows: Mapping[int, RowArrays], indices: Sequence[int], device: torch.device
) -> MicroBatch:
    """Lay the rows of `indices` behind each other.

    Raises:
        TrainingError: A row is missing or doesn't fit the manifest.
    """
    chosen = [_checked(manifest, rows, index) for index in indices]
    lengths = [row.token_ids.size for row in chosen]
    layout = pack_layout(lengths, device)
    row_weights = manifest.loss_weight.as_numpy()
    advantages = [_advantages(manifest, index, row) for index, row in zip(indices, chosen, strict=True)]

    def tensor(parts: Sequence[npt.NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(joined).to(device=device, dtype=dtype)

    mask_T = tensor([row.loss_mask for row in chosen], torch.bool)
    weights = [np.full(length, row_weights[index]) for index, length in zip(indices, lengths, strict=True)]
    return MicroBatch(
        tokens_T=tensor([row.token_ids for row in chosen], torch.int64),
        layout=layout,
        target_N=mask_T.nonzero().squeeze(-1),
        weight_T=tensor(weights, torch.float32),
        loss=LossBatch(
            rows=Rows.from_cu_seqlens(layout.cu_seqlens),
            loss_mask_T=mask_T,
            advantages_T=tensor(advantages, torch.float32),
            old_logp_T=tensor([row.logprobs for row in chosen], torch.float32),
            versions_T=tensor([row.versions for row in chosen], torch.int64),
            current_version=manifest.step,
        ),
    )


def _checked(manifest: Manifest, rows: Mapping[int, RowArrays], index: int) -> RowArrays:
    row = rows.get(index)
    name = manifest.row_ids[index]
    if row is None:
        raise TrainingError(f"row {index} ({name}) is needed on this rank and was not fetched")
    size = row.token_ids.size
    expected = int(manifest.num_tokens.as_numpy()[index])
    found = {size, row.loss_mask.size, row.logprobs.size, row.versions.size, row.turns.size}
    if found != {expected} or not size:
        raise TrainingError(f"row {index} ({name}): expected {expected} tokens everywhere, found {sorted(found)}")
    if bool(row.loss_mask[0]):
        raise TrainingError(f"row {index} ({name}): its first token can't be trained, nothing before it predicts it")
    return row


def _advantages(manifest: Manifest, index: int, row: RowArrays) -> npt.NDArray[np.float64]:
    """One advantage a token: the row's, or that of the token's turn."""
    per_turn = manifest.turn_advantages[index] if manifest.turn_advantages else []
    if not per_turn:
        return np.full(row.token_ids.size, manifest.advantage.as_numpy()[index], dtype=np.float64)
    turns = np.unique(row.turns[row.turns >= 0])
    if len(turns) != len(per_turn):
        raise TrainingError(
            f"row {index} ({manifest.row_ids[index]}) has {len(turns)} turns and {len(per_turn)} turn advantages"
        )
    place = np.searchsorted(turns, np.maximum(row.turns, turns[0]))
    return np.where(row.turns >= 0, np.asarray(per_turn, dtype=np.float64)[place], 0.0)


def spread(values_N: Tensor, batch: MicroBatch) -> Tensor:
    """Values of the trained tokens at their places in the pack, 0 elsewhere: [T], differentiable."""
    return values_N.new_zeros(batch.tokens_T.shape[0]).index_copy(0, batch.target_N, values_N)
