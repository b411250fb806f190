"""What `partition.json` says about bins: properties and sums, not identities (ties may fall otherwise)."""

from collections.abc import Callable, Sequence

import pytest
from golden_case import Case, array

from stages.assembly.balance import Bins, balanced_kk, balanced_lpt, bin_sums, contiguous, karmarkar_karp
from stages.assembly.packing import first_fit_decreasing, kk_pack, light_ends


def _lengths(case: Case) -> list[int]:
    return array(case.inputs["lengths"]).astype(int).tolist()


def _count(case: Case, key: str, default: int = 1) -> int:
    given = case.params.get(key)
    return default if given is None else int(given)


def _check_bins(case: Case, lengths: Sequence[int], bins: Bins, *, same_sums: bool = True) -> None:
    """The file's properties; where ties or another method may end elsewhere, no worse than the file."""
    expected = case.expected
    sums = sorted(bin_sums(lengths, bins), reverse=True)
    counts = sorted((len(members) for members in bins), reverse=True)
    assert expected["covers_all"] is True
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    reference = expected["partitions"]
    assert sorted(bin_sums(lengths, reference), reverse=True) == expected["bin_sums_sorted"]
    assert len(bins) == expected["n_bins"]
    assert sums[0] <= expected["max_bin"]
    if same_sums:
        assert sums == expected["bin_sums_sorted"]
        assert counts == expected["bin_counts_sorted"]
        assert sums[-1] == expected["min_bin"]
    assert sums[0] - sums[-1] <= expected["spread"]
    expected.without_effect("bin_counts_sorted", "min_bin")  # read above where the same method was used


def _balanced_greedy(case: Case) -> None:
    lengths = _lengths(case)
    bins = balanced_lpt(lengths, int(case.params["K"]))
    assert max(map(len, bins)) - min(map(len, bins)) <= 1
    _check_bins(case, lengths, bins)


def _kk(case: Case) -> None:
    lengths, capacity = _lengths(case), int(case.params["capacity"])
    min_bins, multiple = _count(case, "min_groups"), _count(case, "n_groups_divisor")
    if case.params.get("equal_size"):
        wanted = max(min_bins, -(-sum(lengths) // capacity))
        bins = balanced_kk(lengths, -(-wanted // multiple) * multiple)
    elif int(case.expected["n_bins"]) % multiple:  # the reference gives another number of bins than it was asked for
        case.expected.without_effect(*case.expected)
        with pytest.raises(ValueError, match="can't fill"):
            kk_pack(lengths, capacity, min_bins=min_bins, multiple=multiple)
        return
    else:
        bins = kk_pack(lengths, capacity, min_bins=min_bins, multiple=multiple)
    assert max(bin_sums(lengths, bins)) <= capacity
    _check_bins(case, lengths, bins)


def _ffd(case: Case) -> None:
    lengths, capacity = _lengths(case), int(case.params["capacity"])
    bins = first_fit_decreasing(
        lengths, capacity, min_bins=_count(case, "min_groups"), multiple=_count(case, "n_groups_divisor")
    )
    assert max(bin_sums(lengths, bins)) <= capacity
    _check_bins(case, lengths, bins)


def _error(case: Case) -> None:
    """A budget that can't be kept is refused. Numbers that don't divide are not refused here: any rows go over any bins, evenly."""
    assert case.expected["error"]
    lengths = _lengths(case)
    if "capacity" in case.params:
        pack = kk_pack if "kk_" in case.source else first_fit_decreasing
        arguments = {"min_bins": _count(case, "min_groups"), "multiple": _count(case, "n_groups_divisor")}
        with pytest.raises(ValueError, match=r"longer|can't fill"):
            pack(lengths, int(case.params["capacity"]), **arguments)
        return
    (num_bins,) = [int(case.params[key]) for key in ("K", "k", "k_partitions") if key in case.params]
    case.params.without_effect("equal_size")  # every bin gets as many, divisible or not
    for bins in (balanced_lpt(lengths, num_bins), balanced_kk(lengths, num_bins)):
        sizes = [len(members) for members in bins]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    if len(lengths) < num_bins:
        with pytest.raises(ValueError, match="ranges"):
            contiguous(lengths, num_bins)


def _contiguous(case: Case) -> None:
    lengths = _lengths(case)
    ranges = contiguous(lengths, int(case.params["k"]))
    sums = [sum(lengths[start:end]) for start, end in ranges]
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == len(lengths)
    assert all(end > start for start, end in ranges)
    reference = case.expected["ranges"]
    assert [sum(lengths[start:end]) for start, end in reference] == case.expected["bin_sums"]
    assert max(sums) - min(sums) <= case.expected["spread"]


def _reorder(case: Case) -> None:
    """Batches of equal size and near-equal sums, the heaviest first."""
    lengths, each = _lengths(case), int(case.params["n_seqs_per_batch"])
    bins = balanced_lpt(lengths, -(-len(lengths) // each))
    assert max(map(len, bins)) <= each
    sums = bin_sums(lengths, bins)
    assert max(sums) - min(sums) <= case.expected["max_diff"]
    assert sorted(case.expected["order"]) == sorted(item for members in bins for item in members)


def _verl_kk(case: Case) -> None:
    lengths, num_bins = _lengths(case), int(case.params["k_partitions"])
    equal = bool(case.params["equal_size"])
    bins = balanced_kk(lengths, num_bins) if equal else karmarkar_karp(lengths, num_bins)
    _check_bins(case, lengths, bins)


def _verl_greedy(case: Case) -> None:
    """The reference deals in the order given; longest first is no worse."""
    lengths, num_bins = _lengths(case), int(case.params["k_partitions"])
    bins = balanced_lpt(lengths, num_bins) if case.params["equal_size"] else karmarkar_karp(lengths, num_bins)
    if case.params["equal_size"]:
        assert sorted(map(len, bins), reverse=True) == case.expected["bin_counts_sorted"]
    _check_bins(case, lengths, bins, same_sums=False)


def _verl_microbatch(case: Case) -> None:
    """Costs balanced, tokens bounded: the reference may exceed its bound, this project never does."""
    lengths, capacity = _lengths(case), int(case.params["max_token_len"])
    each = _count(case, "force_group_size")
    units = [list(range(start, start + each)) for start in range(0, len(lengths), each)]
    tokens = bin_sums(lengths, units)
    costs = [sum(24576 * lengths[row] + lengths[row] ** 2 for row in unit) for unit in units]
    packed = kk_pack(
        tokens,
        capacity,
        min_bins=_count(case, "min_num_micro_batch"),
        multiple=_count(case, "num_batches_divided_by"),
        costs=costs,
    )
    ordered = case.params.get("use_dynamic_bsz_balance") is not False
    if ordered:
        packed = light_ends(costs, packed)
    case.params.without_effect("same_micro_num_in_dp")  # of one rank
    bins = [[row for unit in members for row in units[unit]] for members in packed]
    assert max(bin_sums(lengths, bins)) <= capacity
    if case.expected["max_bin"] <= capacity:
        _check_bins(case, lengths, bins)
        found, right = bin_sums(costs, packed), case.expected["workloads_in_order"]
        assert found == right if ordered else sorted(found) == sorted(right)
    else:
        assert sorted(row for members in bins for row in members) == list(range(len(lengths)))
        case.expected.without_effect(*case.expected)  # bins over the bound: nothing to match


CHECKS: dict[str, Callable[[Case], None]] = {
    "balanced_greedy": _balanced_greedy,
    "error": _error,
    "kk": _kk,
    "ffd": _ffd,
    "contiguous": _contiguous,
    "reorder": _reorder,
    "verl_kk": _verl_kk,
    "verl_greedy": _verl_greedy,
    "verl_microbatch": _verl_microbatch,
}
