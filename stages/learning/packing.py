"""Index tensors of a pack: rows laid after each other without padding, each row a sequence of its own.

Everything that the losses see is token-aligned: entry t speaks about token t (its log-prob given the tokens before it in its
row). A model's output at t predicts token t + 1, so only labels are shifted, and never across a border; positions are not.
Knows nothing of models. Shapes: T = tokens of the pack, R = rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's default, so other code skips these positions too


def cu_seqlens(lengths: Sequence[int], *, device: torch.device | None = None) -> Tensor:
    """Borders of rows of these lengths: int32 [R + 1], the form that variable-length attention kernels take."""
    if any(length < 0 for length in lengths):
        raise ValueError(f"row lengths must be >= 0, got {list(lengths)}")
    ends = torch.tensor([0, *lengths], dtype=torch.int64, device=device).cumsum(0)
    if ends[-1] > torch.iinfo(torch.int32).max:
        raise ValueError(f"a pack holds at most 2**31 - 1 tokens, got {int(ends[-1])}: lower the token budget")
    return ends.to(torch.int32)


def position_ids(borders: Tensor) -> Tensor:
    """0, 1, 2 … from the start of each row: int64 [T]."""
    starts = borders.long()[:-1].repeat_interleave(borders.long().diff())
    return torch.arange(len(starts), device=borders.device) - starts


def next_token_labels(tokens_T: Tensor, borders: Tensor) -> Tensor:
    """Label of each position: the next token of the same row, `IGNORED_LABEL` at a row's last position: [T]."""
    labels_T = torch.full_like(tokens_T, IGNORED_LABEL)
    source_N = predictors(borders)
    labels_T[source_N] = tokens_T[source_N + 1]
    return labels_T


def predictors(borders: Tensor) -> Tensor:
    """Positions whose output predicts a token of the pack: all but each row's last, int64 [T - non-empty rows].

    The predicted tokens are `predictors(borders) + 1`.
    """
    lengths_R = borders.long().diff()
    keep_T = torch.ones(int(borders[-1]), dtype=torch.bool, device=borders.device)
    keep_T[borders.long()[1:][lengths_R > 0] - 1] = False
    return keep_T.nonzero().squeeze(-1)


def pad_pack(borders: Tensor, size: int) -> Tensor:
    """Borders with one more row that fills the pack to `size` tokens: padding attends to itself only.

    Its loss mask must be 0. A pack that is full already keeps its borders.
    """
    used = int(borders[-1])
    if size < used:
        raise ValueError(f"a pack of {used} tokens can't be padded to {size}")
    return borders if size == used else torch.cat([borders, borders.new_tensor([size])])
