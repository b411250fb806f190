"""What `advantages.json` says about group and batch statistics: rewards in, one advantage per row out, no token values.

Where references disagree on a group of one, this project gives 0 (data/README.md): such rows are compared with 0, the others with the file.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from golden_case import Case, Fields, array, assert_close
from numpy.typing import NDArray

from stages.assembly.advantages import Estimator, EstimatorSettings, advantages, whitening
from stages.assembly.normalization import Level, Normalization, normalize
from stages.assembly.rewards import (
    Cost,
    LengthPenalty,
    Overlong,
    discounted_returns,
    length_penalties,
    overlong_penalty,
    weighted_reward,
)
from stages.learning.gae import TurnIdsError, gae
from stages.learning.rows import Rows

Floats = NDArray[np.float64]


def _areal_norm(case: Case) -> None:
    values = array(case.inputs["x"])
    assert case.inputs["loss_mask"] is None
    sizes = case.inputs["group_sizes"]
    if sizes is None:
        sizes = _slices(len(values), int(case.params["group_size"]))
    else:
        case.params.without_effect("group_size")  # the real sizes are given
    settings = Normalization(
        mean=Level(case.params["mean_level"] or "none"),
        std=Level(case.params["std_level"] or "none"),
        leave_one_out=bool(case.params["mean_leave1out"]),
        ddof=int(bool(case.params["std_unbiased"])),
        eps=float(case.params["eps"]),
    )
    if "error" in case.expected:
        assert case.expected["error"]
        with pytest.raises(ValueError, match="group"):
            normalize(_split(values, sizes), settings)
        return
    found = np.concatenate(normalize(_split(values, sizes), settings))
    if case.defect:
        # The sane tail: a group of its own real size, so a lone last row gives 0 and nothing is divided by eps alone.
        full = len(values) - len(values) % sizes[0]
        assert_close(found[:full], array(case.expected["y"])[:full], case, "normalised", "full groups")
        tail = normalize([list(values[full:])], settings)[0]
        assert list(found[full:]) == tail
        assert np.all(np.abs(found) < 10)
        return
    expected = array(case.expected["y"])
    alone = len(values) == 1 if settings.mean is Level.BATCH else np.repeat(np.asarray(sizes) == 1, sizes)
    if settings.leave_one_out:  # of a set of one: 0, in the batch as in the group
        expected = np.where(alone, 0.0, expected)
    assert_close(found, expected, case, "normalised", "y")


def _overlong(case: Case) -> None:
    settings = Overlong(
        max_tokens=int(case.params["max_response_length"]),
        buffer_tokens=int(case.params["overlong_tokens"]),
        factor=float(case.params["overlong_penalty_factor"]),
    )
    lengths = array(case.inputs["loss_mask"]).sum(axis=1).astype(int)
    rewards = array(case.inputs["rewards"]) + [overlong_penalty(int(length), settings) for length in lengths]
    assert_close(rewards, case.expected["rewards"], case, "token", "rewards")


_VERL_ESTIMATORS = {
    "compute_grpo_outcome_advantage": Estimator.GRPO,
    "compute_grpo_vectorized_outcome_advantage": Estimator.GRPO,
    "compute_rloo_outcome_advantage": Estimator.RLOO,
    "compute_rloo_vectorized_outcome_advantage": Estimator.RLOO,
    "compute_opo_outcome_advantage": Estimator.OPO,
    "compute_gpg_outcome_advantage": Estimator.GPG,
    "compute_reinforce_plus_plus_baseline_outcome_advantage": Estimator.REINFORCE_PP_BASELINE,
    "compute_maxrl_advantage": Estimator.MAX_RL,
}


def _outcome(case: Case) -> None:
    if "token_level_rewards" in case.inputs:
        return _reinforce_pp(case)
    name = _VERL_ESTIMATORS[case.source.rsplit(":", 1)[1]]
    by_std = True
    for key in ("norm_adv_by_std_in_grpo", "grpo_norm_by_std"):
        if key in case.params:
            by_std = bool(case.params[key])
    if name is Estimator.GRPO and not by_std:
        name = Estimator.DR_GRPO
    found, alone = _estimate(case, EstimatorSettings(name=name, eps=float(case.params["epsilon"])))
    mask = array(case.inputs["response_mask"])
    expected = array(case.expected["advantages"])
    if name is Estimator.MAX_RL:  # a mean that is not positive has no meaning as a divisor: no advantage here
        expected = np.where(_mean_of_groups(case)[:, None] > 0, expected, 0.0)
    if "returns" in case.expected:
        assert_close(case.expected["returns"], case.expected["advantages"], case, "token", "returns of outcome methods")
    if name is Estimator.REINFORCE_PP_BASELINE and alone.any():
        return _check_whitened(case, found, mask, expected, alone)
    # verl's vectorized grpo adds eps to the variance's root in another place: the difference is below 1e-6.
    quantity = "metric" if "vectorized" in case.source else "normalised"
    expected = np.where(alone[:, None], 0.0, expected)
    return assert_close(np.where(mask > 0, found[:, None], 0.0), expected * (mask > 0), case, quantity, "advantages")


def _check_whitened(case: Case, found: Floats, mask: Floats, expected: Floats, alone: NDArray[np.bool_]) -> None:
    """The reference lets a group of one keep its raw reward, which moves the whole batch. Whitening is affine: the other rows
    must be the same up to shift and scale, with mean 0 and unbiased variance 1 over their tokens.
    """
    assert np.all(found[alone] == 0.0)
    compared = ~alone & (mask.sum(axis=1) > 0)
    ours = found[compared]
    theirs = np.array([row[kept > 0][0] for row, kept in zip(expected[compared], mask[compared], strict=True)])
    if np.ptp(theirs) < 1e-9:
        assert np.all(ours == 0.0)
        return
    scale, shift = np.polyfit(theirs, ours, 1)
    assert scale > 0
    np.testing.assert_allclose(theirs * scale + shift, ours, rtol=1e-6, atol=1e-8)
    tokens = np.repeat(ours, mask[compared].sum(axis=1).astype(int))
    np.testing.assert_allclose([tokens.mean(), tokens.var(ddof=1)], [0.0, 1.0], atol=1e-6)


def _reinforce_pp(case: Case) -> None:
    """The reference starts the return anew after a gap: each span of trained tokens is a chain of its own."""
    rewards, mask = array(case.inputs["token_level_rewards"]), array(case.inputs["response_mask"]) > 0
    gamma = float(case.params["gamma"])
    returns = np.zeros_like(rewards)
    for row, kept in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], kept.astype(int), [0]])))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            returns[row, start:end] = discounted_returns(rewards[row, start:end].tolist(), gamma)
    assert_close(returns, case.expected["returns"], case, "normalised", "returns", where=mask)
    values = returns[mask].tolist()
    line = whitening(values, [1] * len(values))
    found = [line.at(value) for value in values]
    assert_close(found, array(case.expected["advantages"])[mask], case, "normalised", "advantages")


def _passk(case: Case) -> None:
    settings = EstimatorSettings(
        name=Estimator.GRPO_PASSK, eps=float(case.params["epsilon"]), divide_by_std=bool(case.params["norm_by_std"])
    )
    found, alone = _estimate(case, settings)
    mask = array(case.inputs["response_mask"])
    if "error" in case.expected:  # the reference refuses a group of one; here it has no advantage
        assert case.expected["error"]
        assert alone.any()
        assert np.all(found[alone] == 0.0)
        return
    assert_close(found[:, None] * mask, case.expected["advantages"], case, "normalised", "advantages")


def _slime(case: Case) -> None:
    rewards = array(case.inputs["rewards"])
    each, prompts = int(case.params["n_samples_per_prompt"]), int(case.params["rollout_batch_size"])
    estimator, by_std = case.params["advantage_estimator"], bool(case.params["grpo_std_normalization"])
    if estimator not in ("grpo", "gspo", "cispo"):
        by_std = False  # the setting belongs to these
    centred = by_std or estimator in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")  # others keep rewards
    settings = Normalization(
        mean=Level.GROUP if centred else Level.NONE, std=Level.GROUP if by_std else Level.NONE, eps=1e-6
    )
    sizes = _slices(len(rewards), each)
    found = np.concatenate(normalize(_split(rewards, sizes), settings))
    if case.defect:
        # Samples fewer than n · prompts: still one group per prompt, the short one with the members it has.
        assert len(sizes) == prompts
        for group, values in zip(_split(rewards, sizes), _split(found, sizes), strict=True):
            assert abs(sum(values)) < 1e-9
            assert values == normalize([group], settings)[0]
        return
    assert_close(found, case.expected["rewards"], case, "normalised", "rewards")


def _prime(case: Case) -> None:
    rewards = [float(value) for value in array(case.inputs["rewards"])]
    if "max_rl" in case.source:
        case.params.without_effect("length_penalty")  # not part of the method
        case.inputs.without_effect("num_output_tokens", "num_total_tokens", "num_turns")
        settings = EstimatorSettings(name=Estimator.MAX_RL, eps=0.0)
    else:
        settings = EstimatorSettings(name=Estimator.DR_GRPO)
        penalty = case.params["length_penalty"]
        if isinstance(penalty, Fields):
            added = length_penalties(rewards, _costs(case), _length_penalty(penalty))
            rewards = [reward + extra for reward, extra in zip(rewards, added, strict=True)]
        else:
            case.inputs.without_effect("num_output_tokens", "num_total_tokens", "num_turns")  # without a penalty
    found = advantages([rewards], [[1] * len(rewards)], settings)[0]
    expected = array(case.expected["advantages"])
    assert_close(found, expected if len(rewards) > 1 else [0.0], case, "normalised", "advantages")


def _costs(case: Case) -> list[Cost]:
    columns = (array(case.inputs[key]).astype(int) for key in ("num_output_tokens", "num_total_tokens", "num_turns"))
    return [
        Cost(num_output_tokens=int(out), num_input_tokens=int(total - out), num_turns=int(turns))
        for out, total, turns in zip(*columns, strict=True)
    ]


def _length_penalty(given: Fields) -> LengthPenalty:
    return LengthPenalty(
        output_tokens_weight=float(given.get("num_output_tokens_weight", 0.0)),
        input_tokens_weight=float(given.get("num_input_tokens_weight", 0.0)),
        turns_weight=float(given.get("num_turns_weight", 0.0)),
    )


TRL_EPS = 1e-4


def _trl(case: Case) -> None:
    table = array(case.inputs["rewards_per_func"])
    weights = [float(weight) for weight in array(case.params["reward_weights"])]
    sizes = _slices(len(table), int(case.params["num_generations"]))
    std = {"group": Level.GROUP, "batch": Level.BATCH, "none": Level.NONE}[str(case.params["scale_rewards"])]
    settings = Normalization(mean=Level.GROUP, std=std, std_around_own_mean=True, eps=TRL_EPS)
    match case.params["multi_objective_aggregation"]:
        case "sum_then_normalize":
            totals = [weighted_reward(row.tolist(), weights) for row in table]
            found = _normalize_scored(totals, sizes, settings)
        case "normalize_then_sum":
            each_func = Normalization(mean=Level.GROUP, std=Level.GROUP, eps=TRL_EPS)
            columns = [_normalize_scored(_scored(column), sizes, each_func) for column in table.T]
            scores = [
                [None if np.isnan(raw) else v for raw, v in zip(*pair, strict=True)]
                for pair in zip(table.T, columns, strict=True)
            ]
            totals = [weighted_reward(row, weights) for row in zip(*scores, strict=True)]
            found = _normalize_scored(totals, sizes, Normalization(mean=Level.BATCH, std=Level.BATCH, eps=TRL_EPS))
        case other:
            pytest.fail(f"unknown multi_objective_aggregation {other!r}")
    expected = array(case.expected["advantages"])
    alone = np.repeat(np.asarray(sizes) == 1, sizes)
    assert_close(found, np.where(alone, 0.0, expected), case, "normalised", "advantages")


def _scored(column: Floats) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in column]


def _normalize_scored(values: Sequence[float | None], sizes: Sequence[int], settings: Normalization) -> list[float]:
    """Rows without a reward don't vote and get 0."""
    bounds = np.cumsum([0, *sizes])
    groups = [[v for v in values[a:b] if v is not None] for a, b in pairwise(bounds)]
    normalised = iter(np.concatenate(normalize([group for group in groups if group], settings)))
    return [0.0 if value is None else float(next(normalised)) for value in values]


def _estimate(case: Case, settings: EstimatorSettings) -> tuple[Floats, NDArray[np.bool_]]:
    """One advantage per row in the file's order, and which rows are alone in their group."""
    scores = array(case.inputs["scores"])
    counts = array(case.inputs["response_mask"]).sum(axis=1).astype(int)
    index = np.asarray(case.inputs["index"])
    members = [np.flatnonzero(index == name) for name in dict.fromkeys(index.tolist())]
    found = advantages(
        [scores[rows].tolist() for rows in members], [counts[rows].tolist() for rows in members], settings
    )
    result, alone = np.zeros(len(scores)), np.zeros(len(scores), dtype=bool)
    for rows, values in zip(members, found, strict=True):
        result[rows], alone[rows] = values, len(rows) == 1
    return result, alone


def _mean_of_groups(case: Case) -> Floats:
    """Each row's group mean of the scores."""
    scores, index = array(case.inputs["scores"]), np.asarray(case.inputs["index"])
    return np.array([scores[index == name].mean() for name in index])


def _slices(total: int, each: int) -> list[int]:
    return [min(each, total - start) for start in range(0, total, each)]


def _split(values: Floats, sizes: Sequence[int]) -> list[list[float]]:
    assert sum(sizes) == len(values)
    bounds = np.cumsum([0, *sizes])
    return [values[a:b].tolist() for a, b in pairwise(bounds)]


def _turn_ids_error(case: Case) -> None:
    assert case.expected["error"]
    mask, turns = array(case.inputs["loss_mask_rolled"]), array(case.inputs["turn_ids_rolled"])
    mask_T = torch.tensor(mask.reshape(-1) > 0)
    rows = Rows.from_cu_seqlens(torch.arange(len(mask) + 1) * mask.shape[1])
    with pytest.raises(TurnIdsError):
        gae(
            torch.zeros(len(mask_T)),
            None,
            mask_T,
            rows,
            discount=1.0,
            gae_lambda=1.0,
            turn_ids_T=torch.tensor(turns.reshape(-1).astype(int)),
        )


CHECKS: dict[str, Callable[[Case], None]] = {
    "areal_norm": _areal_norm,
    "error": _turn_ids_error,
    "overlong": _overlong,
    "verl_outcome": _outcome,
    "verl_passk": _passk,
    "skyrl_outcome": _outcome,
    "slime_norm": _slime,
    "prime_group": _prime,
    "trl_group": _trl,
}
