"""Generalised advantage estimation over packed rows (Schulman et al. 2016, arXiv:1506.02438), with tokens or turns as time steps.

Only trained tokens are steps: whatever lies between (prompts, tool output) is skipped, so the next step of a token is the next
trained token of its row. With δ = r + γ·V' − v, A = δ + γλ·A' from the right; V' after the last step is the row's bootstrap.

Knows tensors and rows. Shapes: T = tokens of the packs, R = rows, S = steps.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stages.learning.rows import Rows

Unit = Literal["token", "turn"]


class TurnIdsError(ValueError):
    """Turn ids that don't describe turns: missing on a trained token, or going backwards in a row."""


@dataclass(frozen=True, kw_only=True)
class Gae:
    """Both 0 outside the mask."""

    advantages_T: Tensor
    returns_T: Tensor
    """Advantages plus values: the critic's targets."""


def gae(
    rewards_T: Tensor,
    values_T: Tensor | None,
    mask_T: Tensor,
    rows: Rows,
    *,
    discount: float,
    gae_lambda: float | Tensor,
    bootstrap_R: Tensor | None = None,
    turn_ids_T: Tensor | None = None,
) -> Gae:
    """Advantages and returns of the trained tokens.

    Args:
        rewards_T: reward that each token earned; those outside the mask are ignored.
        values_T: value of the state in which each token was chosen; None: no critic, all 0.
        mask_T: bool, trained tokens.
        rows: the rows.
        discount: γ per step.
        gae_lambda: λ, one number or one per row [R] (`lambdas`).
        bootstrap_R: value of the state after a row that was cut off; None: 0 (every row ended).
        turn_ids_T: with turns as steps: id of each token's turn, not negative on trained tokens, not decreasing in a row. A turn's
            reward is the sum over its tokens, its value that of its first token; all its tokens get its advantage.

    Raises:
        TurnIdsError: turn ids that don't describe turns.
    """
    steps = _token_steps(mask_T, rows) if turn_ids_T is None else _turn_steps(mask_T, rows, turn_ids_T)
    dtype = rewards_T.dtype if values_T is None else values_T.dtype
    rewards_T = torch.where(mask_T, rewards_T, 0).to(dtype)
    values_T = torch.zeros_like(rewards_T) if values_T is None else torch.where(mask_T, values_T, 0)
    reward_S = rewards_T.new_zeros(len(steps.row_S)).index_add(0, steps.step_N, rewards_T[steps.token_N])
    value_S = values_T[steps.first_token_S]
    next_value_S = torch.cat([value_S[1:], value_S.new_zeros(1)])[: len(value_S)]
    after_R = value_S.new_zeros(rows.num_rows) if bootstrap_R is None else bootstrap_R.to(dtype)
    next_value_S = torch.where(steps.last_S, after_R[steps.row_S], next_value_S)
    delta_S = reward_S + discount * next_value_S - value_S
    lambda_R = torch.as_tensor(gae_lambda, dtype=dtype, device=delta_S.device).expand(rows.num_rows)
    advantage_S = discounted_sums(delta_S, discount * lambda_R[steps.row_S], steps.last_S)
    advantages_T = _scatter(advantage_S, steps, mask_T)
    return Gae(advantages_T=advantages_T, returns_T=_scatter(advantage_S + value_S, steps, mask_T))


def discounted_sums(x_S: Tensor, factor_S: Tensor, last_S: Tensor) -> Tensor:
    """y_s = x_s + factor_s·y_{s+1}, starting anew at each row's last step: [S].

    A scan by doubling: log₂ S vector operations in place of S dependent ones, for long rows on any device.
    """
    y_S, carry_S, reach = x_S, torch.where(last_S, 0, factor_S), 1
    while reach < len(x_S):
        y_S = y_S + carry_S * torch.cat([y_S[reach:], y_S.new_zeros(reach)])
        carry_S = carry_S * torch.cat([carry_S[reach:], carry_S.new_zeros(reach)])
        reach *= 2
    return y_S


def num_steps(mask_T: Tensor, rows: Rows, turn_ids_T: Tensor | None = None) -> Tensor:
    """Steps of each row, int64 [R]: trained tokens, or turns where ids are given."""
    if turn_ids_T is None:
        return rows.count(mask_T)
    row_S = _turn_steps(mask_T, rows, turn_ids_T).row_S
    return torch.bincount(row_S, minlength=rows.num_rows)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    token_N: Tensor
    """Positions of the trained tokens, in order."""
    step_N: Tensor
    """Step of each of them."""
    first_token_S: Tensor
    row_S: Tensor
    last_S: Tensor
    """bool, the row's last step."""


def _token_steps(mask_T: Tensor, rows: Rows) -> _Steps:
    token_N = mask_T.nonzero().squeeze(-1)
    step_N = torch.arange(len(token_N), device=mask_T.device)
    row_S = rows.row_T[token_N]
    return _Steps(token_N=token_N, step_N=step_N, first_token_S=token_N, row_S=row_S, last_S=_ends(row_S))


def _turn_steps(mask_T: Tensor, rows: Rows, turn_ids_T: Tensor) -> _Steps:
    token_N = mask_T.nonzero().squeeze(-1)
    row_N, turn_N = rows.row_T[token_N], turn_ids_T[token_N].long()
    if bool((turn_N < 0).any()):
        raise TurnIdsError(
            f"{int((turn_N < 0).sum())} trained tokens have no turn id: expected ids >= 0 wherever the mask is set"
        )
    same_row_N = row_N[1:] == row_N[:-1]
    if bool((same_row_N & (turn_N[1:] < turn_N[:-1])).any()):
        raise TurnIdsError("turn ids go backwards inside a row: expected ids that never decrease from left to right")
    starts_N = torch.ones_like(row_N, dtype=torch.bool)
    starts_N[1:] = ~same_row_N | (turn_N[1:] != turn_N[:-1])
    row_S = row_N[starts_N]
    return _Steps(
        token_N=token_N,
        step_N=starts_N.cumsum(0) - 1,
        first_token_S=token_N[starts_N],
        row_S=row_S,
        last_S=_ends(row_S),
    )


def _ends(row_S: Tensor) -> Tensor:
    last_S = torch.ones_like(row_S, dtype=torch.bool)
    last_S[:-1] = row_S[1:] != row_S[:-1]
    return last_S


def _scatter(x_S: Tensor, steps: _Steps, mask_T: Tensor) -> Tensor:
    out_T = x_S.new_zeros(mask_T.shape)
    out_T[steps.token_N] = x_S[steps.step_N]
    return out_T
