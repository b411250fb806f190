"""Reward mapping as a stage: what an episode's end becomes, transforms and thresholds, and what is never trained on."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.errors import ContractError, RefusedError
from pipeline.sessions import SessionRecord
from schemas.arrays import float32, int32, runs
from schemas.config_arena import StreamConfig
from schemas.errors import ConfigError
from schemas.messages.rollout import (
    EpisodeClass,
    EpisodeEnded,
    FinishReason,
    InteractionRecorded,
    InteractionTokens,
    SessionClosed,
)
from schemas.payload import PayloadRef, inline_ref
from stages.rewards.map_rewards import RewardSettings, gave_up, map_rewards
from stages.rewards.transforms import StreamReward, load_rewards, training_reward

PLAIN = StreamReward(transform=None, threshold=None)


def doubled(score: float, row) -> float:
    return 2 * score


def above(score: float, row, threshold: float) -> float:
    return score - threshold


def endless(score: float, row) -> float:
    return float("inf")


def broken(score: float, row) -> float:
    return row["missing"]


class Sessions:
    """A session of so many calls, each a chain of its own."""

    def __init__(self, num_calls: int = 2, system_error: str = "") -> None:
        self.closed = SessionClosed(session="s", num_interactions=num_calls, system_error=system_error)

    async def read_session(self, session: str) -> SessionRecord:
        calls = [self._call(number) for number in range(self.closed.num_interactions)]
        return SessionRecord(closed=self.closed, interactions=calls)

    def _call(self, number: int) -> InteractionRecorded:
        tokens = InteractionTokens(
            prompt_ids=int32([1, 2]), completion_ids=int32([3 + number]), logprobs=float32([-0.5]), versions=runs([4])
        )
        return InteractionRecorded(
            session="s",
            ordinal=number,
            interaction_id=f"c{number}",
            parent=None,
            tokens=inline_ref(msgspec.msgpack.encode(tokens)),
            num_context=0,
            num_prompt=2,
            num_completion=1,
            min_version=4,
            max_version=4,
            finish_reason=FinishReason.STOP,
            digest=f"d{number}",
        )


class Payloads:
    async def put(self, data) -> PayloadRef:
        return inline_ref(bytes(data))

    async def get(self, ref) -> memoryview:
        return memoryview(ref.inline)


def ended(**changes) -> EpisodeEnded:
    fields = {
        "group": "g0000000",
        "slot": 1,
        "attempt": 0,
        "stream": "math",
        "data_id": "d",
        "session": "s",
        "outcome": EpisodeClass.SCORED,
        "final": True,
        "status": "DONE",
        "score": 0.75,
    }
    return EpisodeEnded(**{**fields, **changes})


async def mapped(end: EpisodeEnded, sessions: Sessions | None = None, reward: StreamReward = PLAIN, **settings):
    return await map_rewards(
        end,
        sessions=sessions or Sessions(),
        payloads=Payloads(),
        settings=RewardSettings(
            **{
                "export": "concat",
                "turn_discount": 0.5,
                "shared_tokens": "first",
                "rewards": {"math": reward},
                "expected_rewards": {"math": "sum@2"},
                **settings,
            }
        ),
    )


async def test_a_score_is_the_reward_of_each_disjoint_row_and_the_raw_one_is_kept_beside_it() -> None:
    (trajectory,) = await mapped(ended(), reward=StreamReward(transform=doubled, threshold=None))
    assert [row.reward for row in trajectory.rows] == [1.5, 1.5]
    assert (trajectory.score, trajectory.reward, trajectory.rejected) == (0.75, 1.5, False)
    assert (trajectory.num_interactions, trajectory.num_completion_tokens) == (2, 2)
    assert [row.row for row in trajectory.rows] == ["g0000000-1-0", "g0000000-1-1"]


async def test_turn_rewards_go_to_their_calls_and_back_by_the_discount() -> None:
    (trajectory,) = await mapped(ended(turn_rewards={"c1": 1.0}))
    assert [row.reward for row in trajectory.rows] == [0.5, 1.0]
    assert trajectory.rewards_per_completion
    assert trajectory.reward == 0.75


async def test_a_reward_for_an_unknown_call_is_refused() -> None:
    with pytest.raises(RefusedError, match="no call of the session has the id 'c9'"):
        await mapped(ended(turn_rewards={"c9": 1.0}))


@pytest.mark.parametrize(
    ("end", "sessions", "reason"),
    [
        ({"outcome": EpisodeClass.SYSTEM, "status": "FAILED", "error": "boom"}, Sessions(), "FAILED: boom"),
        ({"outcome": EpisodeClass.UNKNOWN, "status": "TIMEOUT"}, Sessions(), "TIMEOUT"),
        ({"session": ""}, Sessions(), "no session"),
        ({}, Sessions(system_error="the log was away"), "gateway: the log was away"),
        ({"reward_key": "sum@1"}, Sessions(), "launched under reward sum@1, expected sum@2"),
        ({}, Sessions(num_calls=0), "no model call"),
    ],
)
async def test_what_is_never_trained_on_becomes_a_rejected_trajectory_that_says_why(end, sessions, reason) -> None:
    (trajectory,) = await mapped(ended(**end), sessions)
    assert (trajectory.rejected, trajectory.reason, trajectory.rows, trajectory.reward) == (True, reason, [], None)


async def test_a_models_own_failure_is_trained_with_reward_zero() -> None:
    (trajectory,) = await mapped(ended(outcome=EpisodeClass.MODEL, status="TIMEOUT", score=0.0))
    assert [row.reward for row in trajectory.rows] == [0.0, 0.0]


async def test_an_attempt_that_another_follows_gives_nothing() -> None:
    assert await mapped(ended(final=False)) == []
    assert gave_up(ended(final=False), "x") == []


def test_an_end_that_was_given_up_still_gives_its_slot_a_trajectory() -> None:
    (trajectory,) = gave_up(ended(), "its payload is gone")
    assert (trajectory.rejected, trajectory.reason) == (True, "reward mapping gave up: its payload is gone")


@pytest.mark.parametrize(
    ("reward", "score", "value"),
    [
        (PLAIN, 0.3, 0.3),
        (StreamReward(transform=None, threshold=0.5), 0.5, 1.0),
        (StreamReward(transform=None, threshold=0.5), 0.49, 0.0),
        (StreamReward(transform=doubled, threshold=0.5), 0.3, 0.6),
    ],
)
def test_a_transform_goes_before_a_threshold_and_a_threshold_before_the_score(reward, score, value) -> None:
    assert training_reward(score, {}, reward) == value


def test_a_transform_that_gives_no_finite_number_is_refused_and_one_that_raises_stops() -> None:
    with pytest.raises(RefusedError, match="expected a finite number"):
        training_reward(1.0, {}, StreamReward(transform=endless, threshold=None))
    with pytest.raises(ContractError, match="missing"):
        training_reward(1.0, {"data_id": "d"}, StreamReward(transform=broken, threshold=None))


def test_transforms_are_imported_by_their_path_and_checked(monkeypatch) -> None:
    import sys  # noqa: PLC0415 - this module stands in for a user's

    monkeypatch.setitem(sys.modules, "users_rewards", sys.modules[__name__])

    def stream(name: str, transform: str, threshold: float | None = None) -> StreamConfig:
        path = f"users_rewards:{transform}"
        return StreamConfig(name=name, stream_id=name, reward_transform=path, reward_threshold=threshold)

    rewards = load_rewards({"a": stream("a", "doubled"), "b": stream("b", "above", 0.25)})
    assert training_reward(1.0, {}, rewards["a"]) == 2.0
    assert training_reward(1.0, {}, rewards["b"]) == 0.75
    for bad in (stream("a", "nothing"), stream("a", "above"), stream("a", "PLAIN")):
        with pytest.raises(ConfigError, match=r"streams\.a\.reward_transform"):
            load_rewards({"a": bad})
