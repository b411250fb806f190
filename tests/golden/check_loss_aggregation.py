"""What `loss_aggregation.json` says about reductions: one weight per row, then Σ_i w_i Σ_t k_it·ℓ_it.

The weights come from this project; the contraction is done here, on the rows that the file gives.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from golden_case import Case, array, assert_close, numbers
from numpy.typing import NDArray

from stages.assembly.weights import Aggregation, check_aggregation, group_index, row_weights

Floats = NDArray[np.float64]


class _Rows:
    """Per-token losses and masks cut into rows, whatever layout the file has."""

    def __init__(self, case: Case) -> None:
        self.loss = array(case.inputs["loss"])
        self.kept = array(case.inputs["loss_mask"]) > 0
        given = case.inputs.get("denominator_mask")
        self.trained = self.kept if given is None else array(given) > 0
        if self.loss.ndim == 2:
            width = self.loss.shape[1]
            self.row_of = np.repeat(np.arange(len(self.loss)), width).reshape(self.loss.shape)
            self.num_rows = len(self.loss)
        else:
            lengths = np.diff(array(case.inputs["cu_seqlens"]).astype(int))
            self.row_of = np.repeat(np.arange(len(lengths)), lengths)
            self.num_rows = len(lengths)
        self.counts = np.bincount(self.row_of[self.trained], minlength=self.num_rows)

    def value(self, weights: Floats, rows: Sequence[int] | None = None) -> float:
        """Σ w·ℓ over kept tokens; what lies outside the mask is never read."""
        chosen = self.kept if rows is None else self.kept & np.isin(self.row_of, rows)
        return float(np.sum(weights[self.row_of[chosen]] * self.loss[chosen]))

    def per_token(self, weights: Floats) -> Floats:
        return np.where(self.kept, weights[self.row_of], 0.0)


def _groups(case: Case, num_rows: int) -> NDArray[np.int64]:
    sizes = case.inputs.get("group_sizes")
    return np.arange(num_rows) if sizes is None else group_index(array(sizes).astype(int))


def _mode(case: Case) -> tuple[Aggregation, float | None]:
    divisor = case.params["divisor"]
    return Aggregation(str(case.params["mode"])), None if divisor is None else float(divisor)


def _denominator(mode: Aggregation, counts: NDArray[np.int64], groups: NDArray[np.int64]) -> int:
    """Trained tokens, active groups, or active rows: what a part weighs when parts are combined."""
    match mode:
        case Aggregation.TOKEN_MEAN:
            return int(counts.sum())
        case Aggregation.PROMPT_MEAN:
            return len(np.unique(groups[counts > 0]))
        case Aggregation.SEQ_MEAN | Aggregation.CONSTANT:
            return int((counts > 0).sum())


def _aggregate(case: Case) -> None:
    rows = _Rows(case)
    mode, divisor = _mode(case)
    groups = _groups(case, rows.num_rows)
    weights = row_weights(rows.counts, groups, mode, divisor)
    assert_close(rows.value(weights), case.expected["value"], case, "loss", "value")
    assert_close(rows.per_token(weights), case.expected["grad"], case, "gradient", "grad")
    # "max(Σm, 1)": the reference's normalizer of a batch without trained tokens is not 0, its value is.
    assert max(_denominator(mode, rows.counts, groups), 1) == max(float(case.expected["normalizer"]), 1)


def _microbatches(case: Case) -> None:
    """The weights of the whole mini-batch, and each part's share of the sum: nothing is left to combine."""
    rows = _Rows(case)
    mode, divisor = _mode(case)
    groups = _groups(case, rows.num_rows)
    weights = row_weights(rows.counts, groups, mode, divisor)
    total = _denominator(mode, rows.counts, groups)
    parts = [[int(row) for row in part] for part in case.inputs["microbatch_rows"]]
    assert sorted(row for part in parts for row in part) == list(range(rows.num_rows))
    assert_close(sum(rows.value(weights, part) for part in parts), case.expected["combined"], case, "loss", "combined")
    assert_close(rows.value(weights), case.expected["single_batch"], case, "loss", "single batch")
    assert_close(rows.per_token(weights), case.expected["grad"], case, "gradient", "grad")
    for part, expected in zip(parts, case.expected["microbatches"], strict=True):
        assert set(expected) == {"rows", "group_sizes", "value", "weight"}
        assert part == expected["rows"]
        assert _denominator(mode, rows.counts[part], groups[part]) == expected["weight"]
        share = float(expected["value"]) * float(expected["weight"]) / total
        assert_close(rows.value(weights, part), share, case, "loss", f"share of {part}")


def _error(case: Case) -> None:
    assert case.expected["error"]
    divisor = case.params["divisor"]
    if case.params["mode"] == "prompt_mean" and case.inputs.get("group_sizes") is None:
        case.inputs.without_effect(*case.inputs)
        with pytest.raises(TypeError, match="group"):  # no mode works without every row's group
            row_weights([1, 2], mode=Aggregation.PROMPT_MEAN)  # pyright: ignore[reportCallIssue] - that is the point
        return
    if "microbatch_rows" in case.inputs:
        _check_split_groups(case)
        return
    with pytest.raises(ValueError, match=r"aggregation|group|divisor"):
        _weigh(case, str(case.params["mode"]), None if divisor is None else float(numbers(divisor)))


def _check_split_groups(case: Case) -> None:
    """Groups that are spread over micro-batches are not refused here: weights are the mini-batch's, so the parts add up to it."""
    rows = _Rows(case)
    mode, divisor = _mode(case)
    weights = row_weights(rows.counts, _groups(case, rows.num_rows), mode, divisor)
    parts = [[int(row) for row in part] for part in case.inputs["microbatch_rows"]]
    assert sum(rows.value(weights, part) for part in parts) == pytest.approx(rows.value(weights), rel=1e-12, abs=1e-12)


def _weigh(case: Case, mode: str, divisor: float | None) -> None:
    known = check_aggregation(mode, divisor)
    mask = array(case.inputs["loss_mask"])
    assert mask.shape == array(case.inputs["loss"]).shape
    # A packed mask without row borders gives one number, which is no count per row.
    counts = mask.sum(axis=1) if mask.ndim == 2 else mask.sum()
    row_weights(counts, _groups(case, len(mask)), known, divisor)


def _verl(case: Case) -> None:
    rows = _Rows(case)
    counts = rows.counts.tolist()
    active = int((rows.counts > 0).sum())
    num_tokens, num_rows = case.params.get("batch_num_tokens"), case.params.get("global_batch_size")
    if case.params["mode"] == "token-mean":  # what other ranks hold of the same mini-batch, as one row or as many
        foreign = [] if num_tokens is None else [int(num_tokens) - sum(counts)]
    else:
        foreign = [1] * (0 if num_rows is None else int(num_rows) - active)
    mode, divisor = _verl_mode(case, rows.loss.shape[1], active + len(foreign))
    weights = row_weights(counts + foreign, np.arange(len(counts) + len(foreign)), mode, divisor)
    weights = weights[: rows.num_rows] * int(case.params.get("dp_size") or 1)  # the reference averages over ranks
    assert_close(rows.value(weights), case.expected["value"], case, "loss", "value")
    assert_close(rows.per_token(weights), case.expected["grad"], case, "gradient", "grad")


def _verl_mode(case: Case, width: int, active: int) -> tuple[Aggregation, float | None]:
    if case.params["mode"] != "seq-mean-token-sum-norm":
        case.params.without_effect("loss_scale_factor")  # the fixed length of that mode alone
    match case.params["mode"]:
        case "token-mean":
            return Aggregation.TOKEN_MEAN, None
        case "token-sum":
            return Aggregation.CONSTANT, 1.0 / active
        case "seq-mean-token-mean":
            return Aggregation.SEQ_MEAN, None
        case "seq-mean-token-sum":
            return Aggregation.CONSTANT, 1.0
        case "seq-mean-token-sum-norm":
            return Aggregation.CONSTANT, float(case.params.get("loss_scale_factor") or width)
        case other:
            pytest.fail(f"unknown mode {other!r}")


def _skyrl(case: Case) -> None:
    """The reference divides by all rows and groups, this project by those with trained tokens (data/README.md): the ratio is put back."""
    rows = _Rows(case)
    bounds = [[int(edge) for edge in pair] for pair in case.inputs["prompt_boundaries"]]
    groups = group_index([end - start for start, end in bounds])
    micro = np.arange(rows.num_rows) // int(case.params["micro_batch_size"])
    active_rows = int((rows.counts > 0).sum())
    divisor, ratio = None, 1.0
    match case.params["mode"]:
        case "token_mean":
            mode = Aggregation.TOKEN_MEAN
            case.params.without_effect("max_seq_len")
        case "token_mean_legacy":  # the mean over micro-batches of their token means
            mode, groups = Aggregation.PROMPT_MEAN, micro
            ratio = len(np.unique(micro[rows.counts > 0])) / len(np.unique(micro))
        case "sequence_mean":
            mode, ratio = Aggregation.SEQ_MEAN, active_rows / rows.num_rows
        case "prompt_mean":
            mode, ratio = Aggregation.PROMPT_MEAN, len(np.unique(groups[rows.counts > 0])) / len(bounds)
        case "seq_mean_token_sum_norm":
            mode, divisor = Aggregation.CONSTANT, float(case.params["max_seq_len"])
            ratio = active_rows / rows.num_rows
        case other:
            pytest.fail(f"unknown mode {other!r}")
    case.params.without_effect("max_seq_len")  # a setting of the fixed-length mode alone
    weights = row_weights(rows.counts, groups, mode, divisor) * ratio
    assert_close(rows.value(weights), case.expected["value"], case, "loss", "value")
    assert_close(
        rows.per_token(weights), case.expected["per_token_weight"], case, "gradient", "weights", where=rows.kept
    )


def _slime(case: Case) -> None:
    rows = _Rows(case)
    groups = _groups(case, rows.num_rows)
    sums = {
        "sum_of_seq_means": Aggregation.SEQ_MEAN,
        "sum_of_tokens": Aggregation.TOKEN_MEAN,
        "sum_of_seq_sums_over_group_tokens": Aggregation.PROMPT_MEAN,
    }
    for key, mode in sums.items():
        weights = row_weights(rows.counts, groups, mode) * _denominator(mode, rows.counts, groups)
        assert_close(rows.value(weights), case.expected[key], case, "loss", key)


CHECKS: dict[str, Callable[[Case], None]] = {
    "aggregate": _aggregate,
    "microbatch_combine": _microbatches,
    "error": _error,
    "verl_agg_loss": _verl,
    "skyrl_reduction": _skyrl,
    "slime_reduction": _slime,
}
