"""Draw tokens and say their log-probs. Shapes: see the room's docstring."""

from __future__ import annotations

import torch
from torch import Tensor


def logprobs_at(logits_V: Tensor, temperature: Tensor | float) -> Tensor:
    """log_softmax(logits / temperature) over the whole vocabulary, in float32: the convention of engine and trainer."""
    return torch.log_softmax(logits_V.float() / temperature, dim=-1)


def draw(
    logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor | None, top_k_B: Tensor | None, uniform_B: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per row by inversion of the distribution at `uniform_B` (in [0, 1), float64).

    A temperature of 0 is greedy and its log-prob is that of temperature 1. top_p (1 = all) and top_k (0 = all) narrow
    what can be drawn, not the log-prob, which is over the whole vocabulary. Returns ids [B] int64, log-probs [B].
    """
    greedy_B = temperature_B == 0
    logp_BV = logprobs_at(logits_BV, torch.where(greedy_B, 1.0, temperature_B)[:, None])
    probs_BV = logp_BV.double().exp()
    if top_p_B is not None or top_k_B is not None:
        probs_BV = _narrow(probs_BV, top_p_B, top_k_B)
    cdf_BV = probs_BV.cumsum(dim=-1)
    # strictly above u·total: a token of probability 0 is never drawn, and u < 1 keeps the index inside
    point_B1 = (uniform_B * cdf_BV[:, -1])[:, None]
    ids_B = torch.searchsorted(cdf_BV, point_B1, right=True).squeeze(-1).clamp_(max=logits_BV.shape[-1] - 1)
    if bool(greedy_B.any()):
        ids_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), ids_B)
    return ids_B, logp_BV.gather(-1, ids_B[:, None]).squeeze(-1)


def _narrow(probs_BV: Tensor, top_p_B: Tensor | None, top_k_B: Tensor | None) -> Tensor:
    """Zero all but the smallest set of tokens that holds top_p of the mass, and all but the top_k."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if top_p_B is not None:
        keep_BV &= sorted_BV.cumsum(-1) - sorted_BV < top_p_B[:, None]
    if top_k_B is not None:
        rank_V = torch.arange(sorted_BV.shape[-1])
        keep_BV &= (rank_V < top_k_B[:, None]) | (top_k_B[:, None] == 0)
    keep_BV[:, 0] = True
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV * keep_BV)
