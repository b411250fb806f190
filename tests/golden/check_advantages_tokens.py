"""Advantages over tokens: GAE by token and by turn, λ, KL rewards, normalisation over tokens, and the whole order of a step.

AReaL's arrays are rolled by one: position t holds the mask and log-prob of token t + 1 and the value of the state before it. Read as
"the token at t" they are ours; its last column is the bootstrap value and no token.
"""

from collections.abc import Callable

import numpy as np
import torch
from golden_case import Case, Fields, array, assert_close
from loss_cases import Layout, layout, maybe, number
from torch import Tensor

from stages.learning.gae import Gae, gae, num_steps
from stages.learning.losses.kl import KlEstimate
from stages.learning.normalise import Level, TokenNormalisation, normalise
from stages.learning.rows import Rows
from stages.learning.token_rewards import GaeLambda, kl_rewards, lambdas, overlong_penalty


def _tensor(case: Case, key: str) -> Tensor:
    return torch.as_tensor(array(case.inputs[key]), dtype=torch.float32 if case.dtype == "float32" else torch.float64)


def _rolled_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    discount: float,
    lam: float,
    truncated: Tensor,
    turns: Tensor | None,
) -> Gae:
    """GAE over all columns but the last, whose value is the bootstrap of rows that fill the width; as padded arrays."""
    height, width = mask.shape
    rows = Rows.from_cu_seqlens(torch.arange(height + 1) * (width - 1))

    def flat(x: Tensor) -> Tensor:
        return x[:, :-1].reshape(-1)

    found = gae(
        flat(rewards),
        flat(values),
        flat(mask),
        rows,
        discount=discount,
        gae_lambda=lam,
        bootstrap_R=torch.where(truncated, values[:, -1], 0),
        turn_ids_T=None if turns is None else flat(turns),
    )
    last = values.new_zeros(height, 1)
    return Gae(
        advantages_T=torch.cat([found.advantages_T.reshape(height, -1), last], 1),
        returns_T=torch.cat([found.returns_T.reshape(height, -1), last], 1),
    )


def check_gae(case: Case) -> None:
    mask = _tensor(case, "loss_mask_rolled").bool()
    turns = (
        torch.as_tensor(array(case.inputs["turn_ids_rolled"])).long()
        if case.inputs.get("turn_ids_rolled") is not None
        else None
    )
    found = _rolled_gae(
        _tensor(case, "rewards"),
        _tensor(case, "values"),
        mask,
        discount=number(case.params, "discount"),
        lam=number(case.params, "gae_lambda"),
        truncated=_tensor(case, "seq_no_eos_mask").bool(),
        turns=turns,
    )
    # The last column is no step in the rolled layout, whatever its mask says.
    steps = mask.clone()
    steps[:, -1] = False
    assert_close(found.advantages_T, case.expected["advantages"], case, "token", "advantages", where=steps)
    assert_close(found.returns_T, case.expected["returns"], case, "token", "returns", where=steps)


def check_gae_lambda(case: Case) -> None:
    params, expected = case.params, case.expected
    unit = params["unit"]
    assert unit in {"token", "turn"}, unit
    mask = torch.as_tensor(array(case.inputs["loss_mask_rolled"])).bool()[:, :-1]
    turns = torch.as_tensor(array(case.inputs["turn_ids_rolled"])).long()[:, :-1]
    rows = Rows.from_cu_seqlens(torch.arange(mask.shape[0] + 1) * mask.shape[1])
    tokens_R = num_steps(mask.reshape(-1), rows)
    turns_R = num_steps(mask.reshape(-1), rows, turns.reshape(-1))
    steps_R = tokens_R if unit == "token" else turns_R
    for key, found_R in {
        "effective_token_lengths": tokens_R,
        "turn_counts": turns_R,
        "timestep_lengths": steps_R,
    }.items():
        assert found_R.tolist() == expected[key], key
    forms = {
        "constant": GaeLambda(form="constant", value=number(params, "value")),
        "vapo": GaeLambda(form="vapo", value=number(params, "alpha")),
        "relative_position": GaeLambda(form="relative_position", value=number(params, "q")),
    }
    for key, config in forms.items():
        assert_close(lambdas(config, steps_R), expected[key], case, "token", key)


def _unmasked(values: Tensor) -> Rows:
    return Rows.from_cu_seqlens(torch.arange(values.shape[0] + 1) * values.shape[1])


def _whiten(x: Tensor, mask: Tensor) -> Tensor:
    """verl's whitening: unbiased variance, eps 1e-8 inside the root."""
    rows = _unmasked(x)
    config = TokenNormalisation(eps=1e-8, eps_in_variance=True)
    group_R = torch.zeros(rows.num_rows, dtype=torch.int64)
    return normalise(x.reshape(-1), mask.reshape(-1), rows, config, group_R=group_R, num_groups=1).reshape(x.shape)


def _plain_gae(
    case: Case, mask: Tensor, values: Tensor | None, *, discount: float, lam: float
) -> tuple[Tensor, Tensor]:
    rewards = _tensor(case, "token_level_rewards")
    found = gae(
        rewards.reshape(-1),
        None if values is None else values.reshape(-1),
        mask.reshape(-1),
        _unmasked(rewards),
        discount=discount,
        gae_lambda=lam,
    )
    return found.advantages_T.reshape(rewards.shape), found.returns_T.reshape(rewards.shape)


def check_verl_gae(case: Case) -> None:
    mask = _tensor(case, "response_mask").bool()
    found, returns = _plain_gae(
        case, mask, _tensor(case, "values"), discount=number(case.params, "gamma"), lam=number(case.params, "lam")
    )
    expected = case.expected
    if expected.get("advantages_unwhitened") is not None:
        assert_close(found, expected["advantages_unwhitened"], case, "token", "advantages", where=mask)
    assert_close(returns, expected["returns"], case, "token", "returns", where=mask)
    assert_close(_whiten(found, mask), expected["advantages_whitened"], case, "normalised", "whitened", where=mask)


def check_skyrl_gae(case: Case) -> None:
    """It runs through masked tokens; this project skips them. Shared: the recursion (over every token) and the whitening."""
    mask = _tensor(case, "response_mask").bool()
    everything = torch.ones_like(mask)
    discount, lam = number(case.params, "gamma"), number(case.params, "lam")
    found, returns = _plain_gae(case, everything, _tensor(case, "values"), discount=discount, lam=lam)
    assert_close(returns, case.expected["returns"], case, "token", "returns")
    assert_close(_whiten(found, mask), case.expected["advantages_whitened"], case, "normalised", "whitened", where=mask)
    skipped, _ = _plain_gae(case, mask, _tensor(case, "values"), discount=discount, lam=lam)
    gaps = bool(((~mask[:, :-1]) & mask[:, 1:] & (mask.cumsum(1)[:, :-1] > 0)).any())
    differ = gaps and (discount, lam) != (1, 1)  # with both at 1 a gap changes no sum
    assert differ != bool(torch.allclose(skipped[mask], found[mask])), (
        "the two differ where a gap counts, and only there"
    )


def check_verl_token(case: Case) -> None:
    if "kl_ratio" in case.params:
        return _check_kl_in_reward(case)
    mask = _tensor(case, "response_mask").bool()
    gamma = maybe(case.params, "gamma")
    _, returns = _plain_gae(case, mask, None, discount=1.0 if gamma is None else gamma, lam=1.0)
    baseline = case.inputs.get("reward_baselines")
    if baseline is not None:  # ReMax: the greedy answer's reward is the baseline
        advantages = (returns - torch.as_tensor(array(baseline)).unsqueeze(-1)) * mask
        assert_close(advantages, case.expected["advantages"], case, "token", "advantages", where=mask)
    else:  # REINFORCE++: whitened over tokens
        assert_close(_whiten(returns, mask), case.expected["advantages"], case, "normalised", "advantages", where=mask)
    return assert_close(returns, case.expected["returns"], case, "token", "returns", where=mask)


def _check_kl_in_reward(case: Case) -> None:
    scores, old, ref = (_tensor(case, key) for key in ("token_level_scores", "old_logprobs", "ref_logprobs"))
    penalty = kl_rewards(
        old.reshape(-1),
        ref.reshape(-1),
        torch.ones(old.numel(), dtype=torch.bool),
        coef=number(case.params, "kl_ratio"),
        estimate=KlEstimate(estimator="k1"),
    )
    assert_close(scores + penalty.reshape(scores.shape), case.expected["rewards"], case, "token", "rewards")


def read_normalisation(given: Fields) -> TokenNormalisation:
    """AReaL's settings; its `group_size` is the fallback for batches without group sizes, which these data give."""
    given.without_effect("group_size")
    levels: dict[object, Level] = {None: "none", "group": "group", "batch": "batch"}
    mean, std = (levels[given[key]] if key in given else "batch" for key in ("mean_level", "std_level"))
    unbiased = given.get("std_unbiased", True)
    return TokenNormalisation(
        mean=mean,
        std=std,
        leave_one_out=bool(given.get("mean_leave1out", False)),
        ddof=1 if unbiased or unbiased is None else 0,
        eps=number(given, "eps") if given.get("eps") is not None else 1e-5,
    )


def _groups(case: Case, num_rows: int) -> tuple[Tensor, int]:
    sizes = torch.as_tensor(array(case.inputs["group_sizes"])).long()
    group_R = torch.arange(len(sizes)).repeat_interleave(sizes)
    assert len(group_R) == num_rows
    return group_R, len(sizes)


def check_norm_token(case: Case) -> None:
    config, at = read_normalisation(case.params), layout(case)
    mask_T, x_T = at.mask(case.inputs["loss_mask"]), at.floats(case.inputs["x"])
    group_R, num_groups = _groups(case, at.rows.num_rows)
    found = at.back(normalise(x_T, mask_T, at.rows, config, group_R=group_R, num_groups=num_groups))
    expected = case.expected["y"]
    if not mask_T.any():  # the reference returns its input; an empty mask gives 0 here
        assert bool((found == 0).all())
        return
    # A group of several rows of which one is active is a singleton here (an empty row changes nothing); there it is judged by its tokens.
    active_G = torch.zeros(num_groups, dtype=torch.int64).index_add(0, group_R, (at.rows.count(mask_T) > 0).long())
    single_T = mask_T & at.rows.spread(((active_G == 1) & (torch.bincount(group_R) > 1))[group_R])
    differs_T = (
        single_T
        if config.std == "group" or (config.leave_one_out and config.mean == "group")
        else torch.zeros_like(mask_T)
    )
    assert_close(found, expected, case, "normalised", "y", where=at.back(~differs_T))
    for row in at.rows.row_T[differs_T].unique().tolist():
        mine = found[at.back(differs_T & (at.rows.row_T == row))]
        if config.leave_one_out and config.mean == "group":
            assert bool((mine == 0).all())
        else:  # centred and scaled by 1 instead of the tokens' own std
            theirs = torch.as_tensor(array(expected))[at.back(differs_T & (at.rows.row_T == row))]
            assert float((mine.double() * theirs.norm() - theirs * mine.double().norm()).abs().max()) < 1e-4


def _row_normalised(reward_R: Tensor, config: TokenNormalisation, group_R: Tensor, num_groups: int) -> Tensor:
    """The same normalisation with one value per row."""
    rows = Rows.from_cu_seqlens(torch.arange(len(reward_R) + 1))
    return normalise(
        reward_R, torch.ones(len(reward_R), dtype=torch.bool), rows, config, group_R=group_R, num_groups=num_groups
    )


def _rolled(x: Tensor) -> Tensor:
    return torch.roll(x, -1, dims=-1)


def check_pipeline(case: Case) -> None:
    """Overlong → reward scale and clip → reward normalisation → KL reward → GAE → normalisation over tokens."""
    params, inputs, expected = case.params, case.inputs, case.expected
    inputs.without_effect("input_ids")
    mask = _rolled(_tensor(case, "loss_mask").bool())
    mask[:, -1] = False
    at = Layout(shape=tuple(mask.shape), rows=_unmasked(mask), dtype=torch.float32)
    lengths = _tensor(case, "attention_mask").sum(-1)
    truncated = lengths == mask.shape[1]
    group_R, num_groups = _groups(case, mask.shape[0])
    reward_R = _pipeline_rewards(case, truncated, group_R, num_groups)
    old = _behaviour_policy(case)
    _check_logprobs(case, mask, old)
    kl = _pipeline_kl(case, mask, at, old)
    rewards = kl.clone()
    outcome = torch.where(truncated & bool(params["mask_no_eos_with_zero"]), 0, reward_R)
    place = torch.where(truncated, mask.shape[1] - 2, lengths.long() - 2)
    rewards[torch.arange(len(outcome)), place] += outcome
    values = _tensor(case, "values") if inputs.get("values") is not None else torch.zeros_like(rewards)
    unit = params["gae_timestep_unit"]
    assert unit in {"token", "turn"}, unit
    inputs.without_effect("turn_ids")  # read with turns as steps only
    turns = _rolled(_tensor(case, "turn_ids").long()) if unit == "turn" else None
    local = torch.zeros_like(kl) if turns is None else kl * mask  # a token's own, in no return of its turn
    found = _rolled_gae(
        rewards - local,
        values,
        mask,
        discount=number(params, "discount"),
        lam=number(params, "gae_lambda"),
        truncated=truncated,
        turns=turns,
    )
    assert_close(kl, expected["kl_rewards"], case, "token", "kl rewards", where=mask)
    assert_close(rewards, expected["tot_rewards"], case, "token", "rewards", where=mask)
    assert_close(found.returns_T, expected["returns"], case, "token", "returns", where=mask)
    advantages = found.advantages_T + local
    after = params.get("adv_norm")
    if after is not None:
        assert isinstance(after, Fields)
        flat_T = normalise(
            advantages.reshape(-1),
            mask.reshape(-1),
            at.rows,
            read_normalisation(after),
            group_R=group_R,
            num_groups=num_groups,
        )
        advantages = flat_T.reshape(mask.shape)
    assert_close(advantages, expected["advantages"], case, "normalised", "advantages", where=mask)


def _pipeline_rewards(case: Case, truncated: Tensor, group_R: Tensor, num_groups: int) -> Tensor:
    params = case.params
    reward_R = _tensor(case, "rewards").double()
    if params["overlong_reward_penalty"]:
        reward_R = reward_R + overlong_penalty(
            _tensor(case, "loss_mask").sum(-1).long(),
            max_tokens=int(number(params, "max_new_tokens")),
            buffer_tokens=int(number(params, "overlong_tokens")),
            factor=number(params, "overlong_penalty_factor"),
        )
    else:
        params.without_effect("max_new_tokens")
    assert_close(reward_R, case.expected["rewards_after_overlong"], case, "token", "rewards after overlong")
    clip = number(params, "reward_clip")
    reward_R = ((reward_R + number(params, "reward_bias")) * number(params, "reward_scaling")).clamp(-clip, clip)
    given = params.get("reward_norm")
    if given is not None:
        assert isinstance(given, Fields)
        reward_R = _row_normalised(reward_R, read_normalisation(given), group_R, num_groups)
    return reward_R.float()


def _behaviour_policy(case: Case) -> Tensor:
    """The sampler's log-probs; the recomputed ones take their place where the loss is not decoupled."""
    params, inputs = case.params, case.inputs
    if params["recompute_logprob"] and not params["use_decoupled_loss"]:
        inputs.without_effect("logprobs")
        return _tensor(case, "prox_logp")
    inputs.without_effect("prox_logp")
    return _rolled(_tensor(case, "logprobs"))


def _pipeline_kl(case: Case, mask: Tensor, at: Layout, old: Tensor) -> Tensor:
    """−coef·KL of the behaviour policy to the reference, on trained tokens."""
    coef, estimator = number(case.params, "kl_ctl"), str(case.params["kl_estimator"])
    given = case.inputs.get("ref_logp")
    # Without a reference model the reference's log-probs are 0 there; here a reward without one can't be asked for.
    ref = torch.zeros_like(old) if given is None else torch.as_tensor(array(given), dtype=old.dtype)
    estimate = KlEstimate(estimator=estimator, result_clamp=10.0)
    found_T = kl_rewards(old.reshape(-1), ref.reshape(-1), mask.reshape(-1), coef=coef, estimate=estimate)
    return found_T.reshape(at.shape)


def _check_logprobs(case: Case, mask: Tensor, old: Tensor) -> None:
    """What comes out rolled: behaviour log-probs under the mask, and the mask itself."""
    case.params.without_effect(
        "use_decoupled_loss", "recompute_logprob"
    )  # they choose the loss's policies, not its advantages
    case.inputs.without_effect("prox_logp")
    want = array(case.expected["loss_mask"]).astype(bool)
    assert np.array_equal(want[:, :-1], mask.numpy()[:, :-1])
    assert_close(old, case.expected["logprobs"], case, "token", "logprobs", where=mask)


CHECKS: dict[str, Callable[[Case], None]] = {
    "gae_token": check_gae,
    "gae_turn": check_gae,
    "gae_lambda": check_gae_lambda,
    "verl_gae": check_verl_gae,
    "skyrl_gae": check_skyrl_gae,
    "verl_token": check_verl_token,
    "areal_norm_token": check_norm_token,
    "pipeline": check_pipeline,
}
