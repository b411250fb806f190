"""Filters and weights at the edges; proximal policies at theirs."""

import math

import pytest
import torch

from stages.learning.losses.errors import LossInputError
from stages.learning.losses.importance import Filter, admit
from stages.learning.losses.kl import KlEstimate, binary_kl, kl_estimate
from stages.learning.losses.proximal import proximal_logp, require_finite
from stages.learning.packing import cu_seqlens
from stages.learning.rows import Rows

INF = math.inf


def admitted(prox, old, one, weight="token"):
    rows = Rows.from_cu_seqlens(cu_seqlens([len(prox)]))
    mask_T = torch.ones(len(prox), dtype=torch.bool)
    return admit(torch.tensor(prox), torch.tensor(old), mask_T, rows, filters=(one,), weight=weight)


def test_two_equal_infinities_are_a_ratio_of_one_and_a_single_one_is_not():
    found = admitted([-INF, -INF, -1.0], [-INF, -1.0, -INF], Filter(upper=2.0, lower=0.5))
    assert found.keep_T.tolist() == [True, False, False]
    assert found.weight_T.tolist() == [1.0, 0.0, 0.0]


def test_an_infinite_ratio_is_clamped_to_its_bound():
    assert admitted([-1.0, -INF], [-INF, -1.0], Filter(action="clamp", upper=2.0, lower=0.5)).weight_T.tolist() == [
        2.0,
        0.5,
    ]


def test_a_divergence_that_is_not_a_number_is_outside():
    assert admitted([-INF, -1.0], [-INF, -1.0], Filter(metric="kl_k3", upper=0.1)).keep_T.tolist() == [False, True]


def test_two_certain_tokens_do_not_diverge():
    certain = torch.zeros(1)
    assert binary_kl(certain, certain).tolist() == [0.0]
    assert admitted([0.0], [0.0], Filter(metric="binary_kl", upper=0.1)).keep_T.tolist() == [True]


def test_binary_kl_keeps_its_digits_near_certainty():
    near, nearer = torch.tensor([-1e-6], dtype=torch.float64), torch.tensor([-1e-7], dtype=torch.float64)
    p, q = 1e-6, 1e-7  # probabilities of "another token", to first order
    want = p * math.log(p / q) - (p - q)
    assert float(binary_kl(near, nearer)) == pytest.approx(want, rel=1e-5)


def test_bounds_are_inclusive():
    half = math.log(2.0)
    assert admitted([0.0, half], [0.0, 0.0], Filter(upper=2.0, lower=1e-3)).keep_T.tolist() == [True, True]


def test_a_zeroed_weight_keeps_the_token_and_a_mask_drops_it():
    zeroed = admitted([-1.0, -1.0], [-1.0, -3.0], Filter(action="zero", upper=2.0))
    masked = admitted([-1.0, -1.0], [-1.0, -3.0], Filter(upper=2.0))
    assert zeroed.keep_T.tolist() == [True, True]
    assert masked.keep_T.tolist() == [True, False]
    assert zeroed.weight_T.tolist() == masked.weight_T.tolist() == [1.0, 0.0]


def test_row_weights_are_the_geometric_mean_or_the_product():
    wide = Filter(level="sequence", upper=100.0)
    geometric = admitted([0.0, 0.0], [-1.0, -2.0], wide, "sequence_geometric").weight_T
    product = admitted([0.0, 0.0], [-1.0, -2.0], wide, "sequence_product").weight_T
    assert geometric.tolist() == pytest.approx([math.exp(1.5)] * 2)
    assert product.tolist() == pytest.approx([math.exp(3.0)] * 2)


def test_every_filter_must_let_a_token_through():
    rows, mask_T = Rows.from_cu_seqlens(cu_seqlens([3])), torch.ones(3, dtype=torch.bool)
    filters = (Filter(upper=1.5), Filter(metric="kl_k2", upper=0.1))
    found = admit(
        torch.tensor([0.0, 0.3, 0.0]), torch.tensor([0.0, 0.0, 0.6]), mask_T, rows, filters=filters, weight="none"
    )
    assert found.keep_T.tolist() == [True, True, False]


@pytest.mark.parametrize(("version", "alpha"), [(-1, 0.0), (0, 2 / 3), (1, 0.5), (2, 0.0), (3, 0.0), (9, 0.0)])
def test_the_approximated_policy_lies_one_version_before_the_current_one(version, alpha):
    new, old = torch.tensor([-2.0]), torch.tensor([-1.0])
    found = proximal_logp("loglinear", new, old, versions_T=torch.tensor([version]), current_version=3)
    assert float(found) == pytest.approx(-1 - alpha)
    mixed = proximal_logp("linear", new, old, versions_T=torch.tensor([version]), current_version=3)
    assert float(mixed.exp()) == pytest.approx((1 - alpha) * math.exp(-1) + alpha * math.exp(-2))


def test_recomputed_infinities_are_refused_with_their_number():
    with pytest.raises(LossInputError, match="2 trained tokens"):
        require_finite(torch.tensor([-INF, -1.0, math.nan, -INF]), torch.tensor([1, 1, 1, 0], dtype=torch.bool))


def test_estimators_agree_with_their_formulas_and_only_k2s_gradient_is_borrowed():
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.3], dtype=torch.float64)
    d = 0.3
    for estimator, value in {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": d}.items():
        borrowed = kl_estimate(logp, reference, KlEstimate(estimator=estimator, gradient_of_k2=True))
        assert float(borrowed.detach()) == pytest.approx(value)
        assert float(torch.autograd.grad(borrowed.sum(), logp)[0]) == pytest.approx(d)
    clamped = kl_estimate(logp * 100, reference, KlEstimate(estimator="k2", result_clamp=10.0))
    assert float(clamped.detach()) == 10.0
