"""Index tensors of packs; rows of packs."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from stages.learning.attention import pack_layout, packed_attention, varlen_attention
from stages.learning.packing import IGNORED_LABEL, cu_seqlens, next_token_labels, pad_pack, position_ids, predictors
from stages.learning.rows import Rows

LENGTHS = st.lists(st.integers(0, 6), max_size=6)


def test_positions_restart_with_each_row_and_are_not_shifted_with_the_labels():
    """PrimeIntellect-ai/prime-rl#1525."""
    borders = cu_seqlens([3, 2, 4])
    assert borders.tolist() == [0, 3, 5, 9]
    assert position_ids(borders).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


def test_padding_of_a_pack_is_a_row_of_its_own():
    """PrimeIntellect-ai/prime-rl#1525: padded to 12."""
    borders = pad_pack(cu_seqlens([3, 2, 4]), 12)
    assert borders.tolist() == [0, 3, 5, 9, 12]
    assert position_ids(borders).tolist()[9:] == [0, 1, 2]
    assert pad_pack(borders, 12) is borders
    with pytest.raises(ValueError, match="can't be padded to 11"):
        pad_pack(borders, 11)


@given(LENGTHS)
def test_labels_are_the_next_token_and_never_cross_a_border(lengths):
    borders, tokens_T = cu_seqlens(lengths), torch.arange(sum(lengths)) + 100
    labels = next_token_labels(tokens_T, borders).tolist()
    start = 0
    for length in lengths:
        row = labels[start : start + length]
        assert row == [100 + start + position + 1 for position in range(length - 1)] + [IGNORED_LABEL] * (length > 0)
        start += length


@given(LENGTHS)
def test_predictors_are_all_positions_with_a_label(lengths):
    borders, tokens_T = cu_seqlens(lengths), torch.arange(sum(lengths))
    assert (
        predictors(borders).tolist()
        == (next_token_labels(tokens_T, borders) != IGNORED_LABEL).nonzero().flatten().tolist()
    )


@given(LENGTHS, st.integers(0, 100))
def test_reductions_over_rows_are_those_of_each_row_alone(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    x_T = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    mask_T = torch.rand(sum(lengths), generator=generator) < 0.6
    rows = Rows.from_cu_seqlens(cu_seqlens(lengths))
    for index, (part_T, keep_T) in enumerate(zip(x_T.split(lengths), mask_T.split(lengths), strict=True)):
        kept = part_T[keep_T]
        assert rows.count(mask_T)[index] == len(kept)
        torch.testing.assert_close(rows.sum(x_T)[index], part_T.sum())
        torch.testing.assert_close(rows.mean(x_T, mask_T)[index], kept.mean() if len(kept) else x_T.new_zeros(()))
        for largest in (True, False):
            want = (kept.max() if largest else kept.min()) if len(kept) else x_T.new_zeros(())
            assert rows.extreme(x_T, mask_T, largest=largest, empty=0.0)[index] == want


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match=">= 0"):
        cu_seqlens([3, -1])


def reference_kernel(
    q_THE, k_TKE, v_TKE, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """What torch's variable-length kernel computes, row by row."""
    assert window_size == (-1, 0)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    rows = zip(*(x.split(cu_seq_k.diff().tolist()) for x in (q_THE, k_TKE, v_TKE)), strict=True)
    return torch.cat(
        [
            scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in row), is_causal=True, scale=scale, enable_gqa=enable_gqa
            )[0].transpose(0, 1)
            for row in rows
        ]
    )


@pytest.mark.parametrize("lengths", [[9], [5, 1, 40, 6, 90], [7, 7, 8]])
def test_a_kernel_that_takes_packs_gives_what_the_portable_way_gives(lengths):
    theirs = list(inspect.signature(varlen_attn).parameters)
    assert theirs[3:7] == list(inspect.signature(reference_kernel).parameters)[3:7]
    assert {"scale", "window_size", "enable_gqa"} <= {*theirs}
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, sum(lengths), 8, generator=draw, requires_grad=True) for heads in (4, 2, 2))
    layout = pack_layout(lengths, torch.device("cpu"))
    portable, _ = packed_attention(torch.nn.Module(), q, k, v, None, scaling=0.3, packed=layout)
    kernel = varlen_attention(q, k, v, layout, 0.3, reference_kernel)
    assert kernel.shape == portable.shape == (1, sum(lengths), 4, 8)
    torch.testing.assert_close(kernel, portable)
    weights = torch.randn(portable.shape, generator=draw)
    for one, other in zip(
        *(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (kernel, portable)), strict=True
    ):
        torch.testing.assert_close(one, other)
