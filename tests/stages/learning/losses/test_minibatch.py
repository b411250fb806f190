"""Rules over the mini-batch see all ranks and treat equal values alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.learning.losses.config import LossConfig
from stages.learning.losses.minibatch import m2po_cutoff, prepare_minibatch

VALUES = st.lists(st.floats(0, 4, allow_subnormal=False), min_size=1, max_size=30)


@given(VALUES, st.floats(1e-3, 3))
def test_m2po_keeps_a_set_whose_mean_is_below_the_threshold_or_the_smallest_alone(values, threshold):
    moment_N = torch.tensor(values, dtype=torch.float64)
    kept_N = moment_N[moment_N <= m2po_cutoff(moment_N, threshold)]
    assert len(kept_N) >= 1
    assert float(kept_N.mean()) < threshold or bool((kept_N == moment_N.min()).all())


@given(VALUES, st.floats(1e-3, 3))
def test_m2po_drops_no_more_than_it_must(values, threshold):
    moment_N = torch.tensor(values, dtype=torch.float64)
    cutoff = m2po_cutoff(moment_N, threshold)
    larger = moment_N[moment_N > cutoff]
    if len(larger):
        with_next_N = moment_N[moment_N <= larger.min()]
        assert float(with_next_N.mean()) >= threshold


@given(VALUES, st.floats(1e-3, 3), st.randoms())
def test_m2po_decides_alike_whatever_the_order(values, threshold, random):
    shuffled = random.sample(values, len(values))
    assert m2po_cutoff(torch.tensor(values), threshold) == m2po_cutoff(torch.tensor(shuffled), threshold)


@pytest.mark.parametrize("name", ["m2po", "kl_cov", "normalised", "row product", "kd m2po"])
def test_ranks_that_gather_decide_like_one_rank_with_everything(configs, make_batch, name):
    config: LossConfig = configs[name]
    parts = [make_batch(lengths=lengths, seed=seed)[1] for lengths, seed in (((5, 3), 1), ((2, 6, 4), 2), ((), 3))]
    together = prepare_minibatch(parts, config, lambda x_N: x_N)
    # Every rank replays the same collectives: record what each would send, then let each receive all of it.
    sent = [record(one, config, parts) for one in parts]
    for rank, one in enumerate(parts):
        found = prepare_minibatch([one], config, player(sent))[0]
        for field in ("narrowed_T", "selected_T", "weight_scale", "distill_scale"):
            mine, want = getattr(found, field), getattr(together[rank], field)
            assert (mine is None) == (want is None)
            if mine is not None:
                torch.testing.assert_close(mine, want)


def record(one, config, parts):
    """What a rank sends in each round, given that the rounds before it were answered with everyone's values."""
    rounds = []
    while True:
        sent = [play_until(part, config, rounds) for part in parts]
        if sent[0] is None:
            break
        rounds.append(sent)
    index = next(i for i, part in enumerate(parts) if part is one)
    return [sent[index] for sent in rounds]


class _NextRoundError(Exception):
    pass


def play_until(part, config, rounds):
    """A rank's next message after the given rounds; None when it needs no more."""
    answers, out = iter(rounds), []

    def gather(x_N):
        known = next(answers, None)
        if known is None:
            out.append(x_N)
            raise _NextRoundError
        return torch.cat(known)

    try:
        prepare_minibatch([part], config, gather)
    except _NextRoundError:
        return out[0]
    return None


def player(sent):
    rounds = iter(zip(*sent, strict=True))
    return lambda _: torch.cat(next(rounds))
