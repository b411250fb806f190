"""One loss weight per row: the four aggregation modes as one float64.

    token_mean   1 / Σ_j d_j        mean over the tokens of the mini-batch
    seq_mean     1 / (S · d_i)      mean over active rows of their token mean
    prompt_mean  1 / (G · D_g)      mean over active groups of their token mean
    constant     1 / (S · L)        sums over a fixed length L

d_i loss tokens of row i, S active rows, G active groups, D_g loss tokens of the group, all over one mini-batch. The
loss of an optimizer step is Σ_i w_i Σ_t m_it·ℓ_it: packing, micro-batches and ranks are not in it. A row without loss
tokens has weight 0 and counts nowhere. Knows no message.
"""

from __future__ import annotations

import math
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Aggregation(StrEnum):
    """What one optimizer step's loss is a mean of."""

    TOKEN_MEAN = "token_mean"
    SEQ_MEAN = "seq_mean"
    PROMPT_MEAN = "prompt_mean"
    CONSTANT = "constant"


def check_aggregation(mode: str, divisor: float | None) -> Aggregation:
    """The mode, if it goes with the divisor.

    Raises:
        ValueError: an unknown mode, `constant` without a finite divisor > 0, or a divisor with another mode.
    """
    try:
        known = Aggregation(mode)
    except ValueError:
        raise ValueError(f"aggregation: expected one of {', '.join(Aggregation)}, found {mode!r}") from None
    if known is Aggregation.CONSTANT:
        if divisor is None or not math.isfinite(divisor) or divisor <= 0.0:
            raise ValueError(f"aggregation constant needs a finite divisor > 0 (the fixed length): found {divisor}")
    elif divisor is not None:
        raise ValueError(f"aggregation {known} takes no divisor: found {divisor}; remove it or use constant")
    return known


def group_index(group_sizes: npt.ArrayLike) -> Counts:
    """[R] the group of each row, for groups that stand one after another.

    Raises:
        ValueError: a group without rows.
    """
    sizes_G = np.asarray(group_sizes, dtype=np.int64)
    if np.any(sizes_G < 1):
        raise ValueError(f"every group has at least one row: found sizes {sizes_G.tolist()}")
    return np.repeat(np.arange(len(sizes_G)), sizes_G)


def row_weights(
    num_loss_tokens: npt.ArrayLike, group: npt.ArrayLike, mode: Aggregation, divisor: float | None = None
) -> Floats:
    """The weight of each row of ONE mini-batch, [R] float64.

    Args:
        num_loss_tokens: [R] trained tokens of each row before any rejection; 0 for a masked row.
        group: [R] any integer that is the same for rows of one prompt.
        mode: the aggregation.
        divisor: the fixed length L of `constant`.
    """
    check_aggregation(mode, divisor)
    d_R = np.asarray(num_loss_tokens, dtype=np.int64)
    group_R = np.asarray(group, dtype=np.int64)
    if d_R.shape != group_R.shape or d_R.ndim != 1:
        raise ValueError(f"expected one group per row, found {d_R.shape} counts and {group_R.shape} groups")
    active_R = d_R > 0
    denominator_R = _denominators(d_R, group_R, active_R, mode, divisor)
    return np.where(active_R, 1.0 / denominator_R, 0.0)


def _denominators(
    d_R: Counts, group_R: Counts, active_R: npt.NDArray[np.bool_], mode: Aggregation, divisor: float | None
) -> Floats:
    """[R] float64 > 0; the products are exact below 2^53."""
    num_active = int(active_R.sum())
    match mode:
        case Aggregation.TOKEN_MEAN:
            found = np.full(d_R.shape, d_R.sum())
        case Aggregation.SEQ_MEAN:
            found = num_active * d_R
        case Aggregation.CONSTANT:
            found = np.full(d_R.shape, num_active * (divisor or 1.0))
        case Aggregation.PROMPT_MEAN:
            _, index_R = np.unique(group_R, return_inverse=True)
            tokens_G = np.zeros(int(index_R.max()) + 1 if index_R.size else 0, dtype=np.int64)
            np.add.at(tokens_G, index_R, d_R)
            found = int((tokens_G > 0).sum()) * tokens_G[index_R]
    return np.where(active_R, found, 1).astype(np.float64)


def step_weights(
    num_loss_tokens: npt.ArrayLike,
    group: npt.ArrayLike,
    mini_batch: npt.ArrayLike,
    mode: Aggregation,
    divisor: float | None = None,
) -> Floats:
    """`row_weights` of each mini-batch of a step, [R] float64."""
    d_R, group_R = np.asarray(num_loss_tokens, dtype=np.int64), np.asarray(group, dtype=np.int64)
    mini_R = np.asarray(mini_batch, dtype=np.int64)
    found = np.zeros(d_R.shape, dtype=np.float64)
    for mini in np.unique(mini_R):
        chosen = mini_R == mini
        found[chosen] = row_weights(d_R[chosen], group_R[chosen], mode, divisor)
    return found
