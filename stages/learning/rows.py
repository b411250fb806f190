"""Rows inside packed token tensors: reduce over the tokens of a row, spread a row's value over its tokens.

Knows tensors and row borders only. Shapes: T = tokens of a pack (or of several packs after each other), R = rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which row each token belongs to. Rows may be empty; tokens of one row lie together and in order."""

    row_T: Tensor
    """int64, row index of each token."""
    num_rows: int

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Tensor) -> "Rows":
        """Rows of a pack with borders `cu_seqlens` (R + 1 offsets, the first 0, the last T)."""
        lengths = cu_seqlens.long().diff()
        index = torch.arange(len(lengths), device=cu_seqlens.device)
        return Rows(row_T=index.repeat_interleave(lengths), num_rows=len(lengths))

    def sum(self, x_T: Tensor) -> Tensor:
        """Sum over the tokens of each row: [R]."""
        return x_T.new_zeros(self.num_rows).index_add(0, self.row_T, x_T)

    def count(self, mask_T: Tensor) -> Tensor:
        """Tokens under the mask in each row: int64 [R]."""
        return self.sum(mask_T.long())

    def mean(self, x_T: Tensor, mask_T: Tensor) -> Tensor:
        """Mean over the masked tokens of each row, 0 for a row that has none: [R]."""
        return self.sum(torch.where(mask_T, x_T, 0)) / self.count(mask_T).clamp(min=1).to(x_T.dtype)

    def extreme(self, x_T: Tensor, mask_T: Tensor, *, largest: bool, empty: float) -> Tensor:
        """Largest or smallest masked value of each row, `empty` for a row that has none: [R]. NaN wins."""
        start = -torch.inf if largest else torch.inf
        bounded_T = torch.where(mask_T, x_T, start)
        out_R = x_T.new_full((self.num_rows,), start)
        out_R = out_R.scatter_reduce(0, self.row_T, bounded_T, "amax" if largest else "amin")
        return torch.where(self.count(mask_T) > 0, out_R, empty)

    def spread(self, x_R: Tensor) -> Tensor:
        """Give each token its row's value: [T]."""
        return x_R[self.row_T]
