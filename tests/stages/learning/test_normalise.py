"""Normalisation over tokens: whose statistics, and independence of ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.learning.losses.errors import LossConfigError
from stages.learning.normalise import TokenNormalisation, normalise
from stages.learning.packing import cu_seqlens
from stages.learning.rows import Rows

CONFIGS = [
    TokenNormalisation(),
    TokenNormalisation(mean="group", std="batch"),
    TokenNormalisation(mean="group", std="group", ddof=0),
    TokenNormalisation(mean="batch", std="none", leave_one_out=True),
    TokenNormalisation(mean="none", std="batch", eps_in_variance=True),
]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 30), cut=st.integers(0, 5), config=st.sampled_from(CONFIGS))
def test_a_split_over_ranks_changes_nothing(seed, cut, config):
    generator = torch.Generator().manual_seed(seed)
    lengths, groups = [4, 2, 3, 1, 5], torch.tensor([0, 0, 1, 1, 2])
    x, mask = torch.randn(15, generator=generator, dtype=torch.float64), torch.rand(15, generator=generator) < 0.7
    whole = normalise(x, mask, Rows.from_cu_seqlens(cu_seqlens(lengths)), config, group_R=groups, num_groups=3)
    border = sum(lengths[:cut])
    parts = [
        (x[:border], mask[:border], lengths[:cut], groups[:cut]),
        (x[border:], mask[border:], lengths[cut:], groups[cut:]),
    ]
    found = torch.cat(together(parts, config))
    torch.testing.assert_close(found, whole)


def together(parts, config):
    """Both ranks in lockstep: each round's sums are known once every rank has said its share."""
    rounds = []

    def shares(part):
        said, known = [], iter(rounds)

        class NeedsOthersError(Exception):
            pass

        def reduce(x):
            answer = next(known, None)
            if answer is None:
                said.append(x)
                raise NeedsOthersError
            return answer

        try:
            values, mask, lengths, groups = part
            return normalise(
                values,
                mask,
                Rows.from_cu_seqlens(cu_seqlens(lengths)),
                config,
                group_R=groups,
                num_groups=3,
                reduce=reduce,
            ), None
        except NeedsOthersError:
            return None, said[0]

    while True:
        found = [shares(part) for part in parts]
        if found[0][0] is not None:
            return [values for values, _ in found]
        rounds.append(sum(share for _, share in found))


def plain(x, config, lengths=None, groups=None, mask=None):
    x = torch.tensor(x, dtype=torch.float64)
    rows = Rows.from_cu_seqlens(cu_seqlens(lengths or [len(x)]))
    group_R = torch.tensor(groups or [0] * rows.num_rows)
    mask_T = torch.ones(len(x), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return normalise(x, mask_T, rows, config, group_R=group_R, num_groups=int(group_R.max()) + 1)


def test_no_spread_is_no_advantage():
    assert plain([0.7, 0.7, 0.7], TokenNormalisation(eps=0.0)).tolist() == [0, 0, 0]


def test_an_empty_mask_gives_zero():
    assert plain([1.0, 2.0], TokenNormalisation(), mask=[0, 0]).tolist() == [0, 0]


def test_a_group_with_one_active_row_is_a_singleton_whatever_empty_rows_it_has():
    config = TokenNormalisation(mean="group", std="group", eps=0.0)
    alone = plain([1.0, 3.0], config, lengths=[2], groups=[0])
    beside_an_empty_row = plain([1.0, 3.0, 9.0], config, lengths=[2, 1], groups=[0, 0], mask=[1, 1, 0])
    assert alone.tolist() == beside_an_empty_row.tolist()[:2] == [-1, 1]
    left_out = TokenNormalisation(mean="group", std="none", leave_one_out=True)
    assert plain([1.0, 3.0], left_out, lengths=[2], groups=[0]).tolist() == [0, 0]


def test_leave_one_out_compares_with_the_others():
    assert plain([1.0, 2.0, 6.0], TokenNormalisation(std="none", leave_one_out=True)).tolist() == [-3, -1.5, 4.5]


@pytest.mark.parametrize(
    ("settings_given", "words"),
    [({"ddof": 2}, "ddof"), ({"mean": "row"}, "mean"), ({"mean": "none", "leave_one_out": True}, "leave_one_out")],
)
def test_settings_without_meaning_are_refused(settings_given, words):
    with pytest.raises(LossConfigError, match=words):
        TokenNormalisation(**settings_given)
