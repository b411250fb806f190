"""Golden inputs as packed loss batches, and the comparison of a loss's value, per-token loss and gradient with a file.

Padded inputs become packed rows of the full width, padding masked. Row weights are the project's own, from the aggregation that the
file names. Nothing here computes a loss.
"""

from dataclasses import dataclass

import torch
from golden_case import Case, Fields, array, assert_close
from torch import Tensor

from stages.assembly.weights import Aggregation, row_weights
from stages.learning.losses.batch import LossBatch, Stat
from stages.learning.losses.config import LossConfig
from stages.learning.losses.minibatch import only_rank, prepare_minibatch
from stages.learning.losses.policy import Terms, policy_terms, statistics
from stages.learning.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a case's arrays map to packed tokens."""

    shape: tuple[int, ...]
    rows: Rows
    dtype: torch.dtype

    def floats(self, value: object) -> Tensor:
        """A token array, or one value per row spread over its tokens."""
        tensor = torch.as_tensor(array(value), dtype=self.dtype)
        one_per_row = tensor.shape != self.shape and tensor.numel() == self.rows.num_rows
        return self.rows.spread(tensor.reshape(-1)) if one_per_row else tensor.reshape(-1)

    def mask(self, value: object) -> Tensor:
        return torch.as_tensor(array(value)).reshape(-1).bool()

    def ints(self, value: object) -> Tensor:
        return torch.as_tensor(array(value), dtype=torch.int64).reshape(-1)

    def back(self, tensor_T: Tensor) -> Tensor:
        return tensor_T.detach().reshape(self.shape)


def layout(case: Case, like: str = "loss_mask") -> Layout:
    """The layout of a case, from one of its token arrays and `cu_seqlens` where given."""
    shape = array(case.inputs[like]).shape
    dtype = torch.float32 if case.dtype == "float32" else torch.float64
    borders = case.inputs.get("cu_seqlens")
    if borders is None:
        height, width = shape if len(shape) == 2 else (1, shape[0])
        cu = torch.arange(height + 1) * width
    else:
        cu = torch.as_tensor(array(borders), dtype=torch.int64)
    return Layout(shape=shape, rows=Rows.from_cu_seqlens(cu), dtype=dtype)


def optional(case: Case, at: Layout, key: str) -> Tensor | None:
    value = case.inputs.get(key)
    return None if value is None else at.floats(value)


def number(fields: Fields, key: str) -> float:
    value = fields[key]
    assert isinstance(value, (int, float)), f"{key} is {value!r}, expected a number"
    return float(value)


def maybe(fields: Fields, key: str) -> float | None:
    return None if fields.get(key) is None else number(fields, key)


def weights_of(
    at: Layout, denominator_T: Tensor, mode: object, *, divisor: float | None = None, group_sizes: object = None
) -> Tensor:
    """The manifest's row weights for an aggregation: [R]."""
    counts = at.rows.count(denominator_T).tolist()
    sizes = [1] * len(counts) if group_sizes is None else [int(size) for size in array(group_sizes)]
    groups = [index for index, size in enumerate(sizes) for _ in range(size)]
    return torch.as_tensor(row_weights(counts, groups, Aggregation(str(mode)), divisor), dtype=at.dtype)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: float
    per_token: Tensor
    grad: Tensor
    terms: Terms
    stats: dict[str, Stat]
    at: Layout
    narrowed: Tensor | None

    def mean(self, name: str) -> float:
        return float(self.stats[name].mean())


def run_loss(at: Layout, logp_T: Tensor, batch: LossBatch, config: LossConfig, weight_R: Tensor) -> Outcome:
    """The step's loss Σ w·ℓ and its gradient, through the public functions."""
    logp_T = logp_T.detach().clone().requires_grad_()
    ready = prepare_minibatch([batch], config, only_rank)[0]
    terms = policy_terms(logp_T, ready, config)
    loss = (at.rows.spread(weight_R) * terms.loss_T).sum()
    loss.backward()
    assert logp_T.grad is not None
    return Outcome(
        loss=float(loss.detach()),
        per_token=at.back(terms.loss_T),
        grad=at.back(logp_T.grad),
        terms=terms,
        stats=statistics(terms, ready),
        at=at,
        narrowed=ready.narrowed_T,
    )


def compare(
    case: Case,
    outcome: Outcome,
    *,
    loss: object,
    grad: object = None,
    per_token: object = None,
    where: Tensor | None = None,
) -> None:
    """Value, gradient and per-token loss against a file's; `where` (packed) limits the per-token comparison."""
    assert_close(outcome.loss, loss, case, "loss", "loss")
    if grad is not None:
        assert_close(outcome.grad, grad, case, "gradient", "gradient")
    if per_token is not None:
        keep = outcome.terms.mask_T if where is None else where
        assert_close(outcome.per_token, per_token, case, "token", "per-token loss", where=outcome.at.back(keep))
