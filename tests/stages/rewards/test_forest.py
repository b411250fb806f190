"""Recorded calls to training rows: every sampled token is trained once at the most, rewards land where they belong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.arrays import float32, int32, runs
from schemas.messages.rollout import FinishReason, InteractionRecorded, InteractionTokens
from schemas.payload import inline_ref
from stages.rewards.forest import RewardError, build_rows


def session(calls):
    """Calls as (parent, prompt ids, completion ids[, changes]) → what `build_rows` takes."""
    interactions, tokens, lengths = [], {}, []
    for ordinal, (parent, prompt, completion, *changes) in enumerate(calls):
        known = 0 if parent is None else lengths[parent]
        lengths.append(known + len(prompt) + len(completion))
        tokens[ordinal] = InteractionTokens(
            prompt_ids=int32(prompt),
            completion_ids=int32(completion),
            logprobs=float32([-float(one) for one in completion]),
            versions=runs([ordinal + 1] * len(completion)),
        )
        fields = {
            "session": "s",
            "ordinal": ordinal,
            "interaction_id": f"i{ordinal}",
            "parent": parent,
            "tokens": inline_ref(b""),
            "num_context": known,
            "num_prompt": len(prompt),
            "num_completion": len(completion),
            "min_version": ordinal + 1,
            "max_version": ordinal + 1,
            "finish_reason": FinishReason.STOP,
            "digest": f"d{ordinal}",
            **(changes[0] if changes else {}),
        }
        interactions.append(InteractionRecorded(**fields))
    return interactions, tokens


@st.composite
def forests(draw):
    calls = []
    for ordinal in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, ordinal - 1)) if ordinal else None
        ids = st.lists(st.integers(1, 99), max_size=4)
        changes = {"trainable": draw(st.booleans()), "digest": draw(st.sampled_from(["a", "b", f"d{ordinal}"]))}
        calls.append((parent, draw(ids), draw(ids), changes))
    return calls


@given(forests(), st.sampled_from(["concat", "individual"]), st.booleans())
def test_each_sampled_token_is_trained_once_at_the_most_and_none_is_lost(calls, style, drop):
    interactions, tokens = session(calls)
    rows = build_rows(interactions, tokens, style=style, shared_tokens="first", drop_retries=drop)
    trained: dict[int, int] = {}
    for row in rows:
        for ordinal in set(row.turns[row.loss_mask].tolist()):
            assert trained.setdefault(ordinal, row.leaf) == row.leaf
        for ordinal in row.chain:
            place = row.turns == ordinal
            assert row.token_ids[place].tolist() == calls[ordinal][2]
            assert row.logprobs[place].tolist() == [-float(one) for one in calls[ordinal][2]]
            assert set(row.versions[place].tolist()) <= {ordinal + 1}
        assert row.token_ids.size == row.loss_mask.size == row.logprobs.size == row.versions.size == row.turns.size
        assert row.num_loss_tokens == row.loss_mask.sum()
        assert np.array_equal(row.versions == -1, row.turns == -1)
    held = {ordinal for row in rows for ordinal in row.chain}
    wanted = {one.ordinal for one in interactions if one.trainable and one.num_completion and one.ordinal in held}
    if style == "concat":
        assert set(trained) == wanted
    if not drop:
        assert held == set(range(len(calls)))


@given(forests(), st.sampled_from(["concat", "individual"]))
def test_all_trains_shared_tokens_in_every_row_that_holds_them(calls, style):
    interactions, tokens = session(calls)
    for row in build_rows(interactions, tokens, style=style, shared_tokens="all", drop_retries=False):
        sampled = sum(len(calls[ordinal][2]) for ordinal in row.chain if interactions[ordinal].trainable)
        assert row.num_loss_tokens == sampled


BRANCHES = [(None, [1], [2]), (0, [3], [4]), (0, [5], [6])]


def test_an_episodes_score_is_each_concat_rows_reward():
    rows = build_rows(*session([*BRANCHES, (None, [7], [8])]), score=0.5)
    assert [(row.chain, row.reward, row.turn_rewards) for row in rows] == [
        ((0, 1), 0.5, ()),
        ((0, 2), 0.5, ()),
        ((3,), 0.5, ()),
    ]


def test_an_individual_episodes_score_goes_to_the_last_call_and_back_by_the_discount():
    rows = build_rows(*session(BRANCHES), style="individual", score=1.0, discount=0.5)
    assert [row.reward for row in rows] == [0.25, 0.5, 1.0]
    assert [row.reward for row in build_rows(*session(BRANCHES), style="individual", score=1.0)] == [1.0, 1.0, 1.0]


def test_turn_rewards_stand_beside_their_row():
    rows = build_rows(*session(BRANCHES), turn_rewards={"i0": 0.25, "i2": 1.0})
    assert [(row.reward, row.turn_rewards) for row in rows] == [(None, (0.25, 0.0)), (1.0, (0.25, 1.0))]


@pytest.mark.parametrize(
    "rewards", [{"turn_rewards": {"nobody": 1.0}}, {"score": float("nan")}, {"turn_rewards": {"i0": float("inf")}}]
)
def test_rewards_that_cannot_be_placed_are_an_error(rewards):
    with pytest.raises(RewardError):
        build_rows(*session(BRANCHES), **rewards)


def test_what_is_kept_out_of_training_stays_in_the_context():
    (row,) = build_rows(*session([(None, [1], [2, 3], {"trainable": False}), (0, [4], [5])]))
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.loss_mask.tolist() == [False, False, False, False, True]
    assert (row.min_version, row.max_version) == (2, 2)


def test_retries_of_one_call_are_dropped_but_choices_are_not():
    tries = [(None, [1], [2], {"digest": "d"}), (None, [1], [3], {"digest": "d"}), (None, [1], [4], {"digest": "d/1"})]
    assert [row.leaf for row in build_rows(*session(tries))] == [1, 2]
    continued = [*tries, (0, [5], [6])]
    assert [row.leaf for row in build_rows(*session(continued))] == [2, 3]


def test_a_missing_ordinal_or_payload_is_an_error():
    interactions, tokens = session(BRANCHES)
    with pytest.raises(RewardError, match="ordinals"):
        build_rows(interactions[1:], tokens)
    with pytest.raises(RewardError, match="missing"):
        build_rows(interactions, {0: tokens[0], 1: tokens[1]})
    with pytest.raises(RewardError, match="expected"):
        build_rows(interactions, {**tokens, 2: session([(None, [1, 2], [2])])[1][0]})


def test_a_row_whose_last_answer_was_cut_is_truncated():
    (row,) = build_rows(*session([(None, [1], [2], {"finish_reason": FinishReason.LENGTH})]))
    assert row.truncated


def test_a_session_without_calls_has_no_rows():
    assert build_rows([], {}) == []
