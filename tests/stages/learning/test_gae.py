"""GAE over packed rows against a loop over each row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.learning.gae import TurnIdsError, discounted_sums, gae, num_steps
from stages.learning.losses.errors import LossConfigError
from stages.learning.packing import cu_seqlens
from stages.learning.rows import Rows
from stages.learning.token_rewards import GaeLambda, lambdas, overlong_penalty, place_rewards


def by_loop(rewards, values, mask, discount, lam, bootstrap):
    """One row, from the right; masked tokens are skipped."""
    advantages, next_value, carried = [0.0] * len(rewards), bootstrap, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            carried = rewards[t] + discount * next_value - values[t] + discount * lam * carried
            next_value = values[t]
            advantages[t] = carried
    return advantages


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    seed=st.integers(0, 50),
    discount=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_the_scan_gives_what_a_loop_gives(lengths, seed, discount, lam):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=generator, dtype=torch.float64)  # noqa: E731 - a name for a draw
    size = sum(lengths)
    rewards, values, bootstrap = draw(size), draw(size), draw(len(lengths))
    mask = torch.rand(size, generator=generator) < 0.7
    rows = Rows.from_cu_seqlens(cu_seqlens(lengths))
    found = gae(rewards, values, mask, rows, discount=discount, gae_lambda=lam, bootstrap_R=bootstrap)
    want = []
    for index, (r, v, m) in enumerate(
        zip(rewards.split(lengths), values.split(lengths), mask.split(lengths), strict=True)
    ):
        want += by_loop(r.tolist(), v.tolist(), m.tolist(), discount, lam, float(bootstrap[index]))
    torch.testing.assert_close(found.advantages_T, torch.tensor(want, dtype=torch.float64))
    torch.testing.assert_close(found.returns_T, torch.where(mask, found.advantages_T + values, 0))


def test_a_turn_is_one_step_with_the_sum_of_its_rewards():
    rows = Rows.from_cu_seqlens(cu_seqlens([6]))
    mask = torch.tensor([0, 1, 1, 0, 1, 1], dtype=torch.bool)
    turns = torch.tensor([-1, 0, 0, -1, 1, 1])
    rewards, values = torch.tensor([9.0, 1, 1, 9, 0, 4]), torch.tensor([9.0, 0.5, 7, 9, 2, 7])
    found = gae(rewards, values, mask, rows, discount=0.5, gae_lambda=1.0, turn_ids_T=turns)
    second = 4 - 2
    first = 2 + 0.5 * 2 - 0.5 + 0.5 * second
    assert found.advantages_T.tolist() == [0, first, first, 0, second, second]
    assert num_steps(mask, rows, turns).tolist() == [2]
    assert num_steps(mask, rows).tolist() == [4]


@pytest.mark.parametrize(("turns", "words"), [([0, -1, 1], "no turn id"), ([1, 0, 0], "backwards")])
def test_turn_ids_that_describe_no_turns_are_refused(turns, words):
    rows = Rows.from_cu_seqlens(cu_seqlens([3]))
    with pytest.raises(TurnIdsError, match=words):
        gae(
            torch.zeros(3),
            None,
            torch.ones(3, dtype=torch.bool),
            rows,
            discount=1.0,
            gae_lambda=1.0,
            turn_ids_T=torch.tensor(turns),
        )


def test_without_a_critic_every_token_gets_the_discounted_rewards_to_come():
    rows = Rows.from_cu_seqlens(cu_seqlens([3, 2]))
    mask = torch.tensor([1, 0, 1, 1, 1], dtype=torch.bool)
    found = gae(torch.tensor([1.0, 5, 2, 0, 3]), None, mask, rows, discount=0.5, gae_lambda=1.0)
    assert found.advantages_T.tolist() == [2.0, 0, 2, 1.5, 3]


def test_each_row_may_have_its_own_lambda():
    rows = Rows.from_cu_seqlens(cu_seqlens([2, 2]))
    everything = torch.ones(4, dtype=torch.bool)
    found = gae(torch.tensor([0.0, 1, 0, 1]), None, everything, rows, discount=1.0, gae_lambda=torch.tensor([0.0, 1.0]))
    assert found.advantages_T.tolist() == [0, 1, 1, 1]


def test_a_long_row_takes_no_loop_over_its_tokens():
    ones = torch.ones(32768, dtype=torch.float64)
    last = torch.zeros(32768, dtype=torch.bool)
    last[-1] = True
    assert discounted_sums(ones, ones, last)[0] == 32768


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (GaeLambda(value=0.9), [0.9, 0.9, 0.9]),
        (GaeLambda(form="vapo", value=0.5), [0, 0, 0.6]),
        (GaeLambda(form="relative_position", value=0.25), [1, 0.25, 0.25**0.25]),
    ],
)
def test_lambda_follows_the_number_of_steps(config, want):
    assert lambdas(config, torch.tensor([1, 2, 5])).tolist() == pytest.approx(want)


def test_a_lambda_without_meaning_is_refused():
    with pytest.raises(LossConfigError, match="at most 1"):
        GaeLambda(value=1.5)


def test_the_overlong_penalty_grows_inside_the_buffer_only():
    found = overlong_penalty(torch.tensor([5, 8, 9, 10, 12]), max_tokens=10, buffer_tokens=2, factor=0.5)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1.0]
    with pytest.raises(LossConfigError, match="1 to max_tokens"):
        overlong_penalty(torch.tensor([5]), max_tokens=10, buffer_tokens=0, factor=0.5)


def test_a_row_reward_goes_to_its_last_trained_token():
    rows = Rows.from_cu_seqlens(cu_seqlens([3, 2, 0]))
    mask = torch.tensor([1, 1, 0, 0, 0], dtype=torch.bool)
    assert place_rewards(torch.tensor([2.0, 7.0, 7.0]), mask, rows).tolist() == [0, 2, 0, 0, 0]
