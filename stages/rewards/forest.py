"""A session's recorded calls as training rows. Pure: messages and their tokens in, arrays out.

The calls form a forest by their exact tokens. `concat`: each leaf is a row that holds its whole chain, trained where it was sampled.
`individual`: each call is a row. Retry orphans go first, then rewards are discounted, then rows are cut.

Legend of shapes: T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.messages.rollout import FinishReason, InteractionRecorded, InteractionTokens

Style = Literal["concat", "individual"]
SharedTokens = Literal["first", "all"]
"""Who trains a sampled token that several rows hold: the row of the first created leaf, or every row."""


class RewardError(ValueError):
    """Rewards, or a session's calls, that can't be turned into rows."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What the shape of the forest needs of one call."""

    id: str
    parent: int | None
    """Index of the call that this one extends."""
    digest: str = ""
    """Of its whole input: equal ones are tries of one call. Empty: never a retry."""
    created: float = 0.0
    complete: bool = True
    """Whether it was answered."""
    exact: bool = True
    """Whether prompts reuse recorded ids, so that a chain is one sequence of tokens."""


class TurnRewards(msgspec.Struct, frozen=True, kw_only=True):
    """One reward per turn, in order of creation."""

    values: tuple[float | None, ...]
    """None: nobody set one."""
    discounted: bool = False


class BuiltRow(msgspec.Struct, frozen=True, kw_only=True):
    """One training row."""

    leaf: int
    """Ordinal of its last call."""
    chain: tuple[int, ...]
    """Ordinals of its calls, first to last."""
    token_ids: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]: sampled, trainable and owned by this row."""
    logprobs: npt.NDArray[np.float32]
    """[T], 0 where nothing was sampled."""
    versions: npt.NDArray[np.int32]
    """[T], -1 where nothing was sampled."""
    turns: npt.NDArray[np.int32]
    """[T] ordinal of the call that sampled a token, -1 where nothing was sampled."""
    num_loss_tokens: int
    min_version: int
    """Over the tokens with loss; over all sampled ones when none has."""
    max_version: int
    reward: float | None
    """Of the row; None when nobody set one."""
    turn_rewards: tuple[float, ...]
    """Of each call on the chain (0 where nobody set one); empty when the episode has one score only."""
    truncated: bool
    """The last completion ran out of its budget."""
    temperature: float


def build_rows(
    interactions: Sequence[InteractionRecorded],
    tokens: Mapping[int, InteractionTokens],
    *,
    style: Style = "concat",
    shared_tokens: SharedTokens = "first",
    drop_retries: bool = True,
    score: float | None = None,
    turn_rewards: Mapping[str, float] | None = None,
    discount: float | None = None,
) -> list[BuiltRow]:
    """The rows of one session, in the order of their last calls.

    Args:
        interactions: all of them, ordinals 0, 1, …
        tokens: the payloads by ordinal.
        score: of the whole episode: every `concat` row gets it; with `individual` the last call does.
        turn_rewards: interaction id → reward, instead of a score.
        discount: reward[i] += discount · reward[i+1], walking back in order of creation. None: no discounting (a score still reaches
            every `individual` row: as with 1).

    Raises:
        RewardError: ordinals with gaps, payloads that don't fit, rewards for unknown calls or that are no finite numbers.
    """
    if [one.ordinal for one in interactions] != list(range(len(interactions))):
        raise RewardError(f"expected ordinals 0 to {len(interactions) - 1}, found {[o.ordinal for o in interactions]}")
    turns = [
        Turn(id=one.interaction_id, parent=one.parent, digest=one.digest, created=one.ordinal) for one in interactions
    ]
    kept = keep_turns(turns) if drop_retries else tuple(range(len(turns)))
    rewards = place_rewards(turns, kept, score=score, turn_rewards=turn_rewards)
    if discount is None and style == "individual" and not turn_rewards and score is not None:
        discount = 1.0
    if discount is not None:
        rewards = discount_rewards(rewards, discount, kept)
    owned: set[int] = set()
    rows: list[BuiltRow] = []
    for leaf in export_turns(turns, kept, style):
        chain = chain_of(turns, leaf)
        trained = [ordinal for ordinal in chain if shared_tokens == "all" or ordinal not in owned]
        if shared_tokens == "first" and style == "individual":
            trained = [leaf]
        owned.update(chain)
        row = _row(interactions, tokens, chain, frozenset(trained))
        every_row = score if style == "concat" and not turn_rewards else rewards.values[leaf]
        per_turn = tuple(rewards.values[one] or 0.0 for one in chain) if turn_rewards else ()
        rows.append(msgspec.structs.replace(row, reward=every_row, turn_rewards=per_turn))
    return rows


def keep_turns(turns: Sequence[Turn]) -> tuple[int, ...]:
    """The turns that are no retry orphans.

    Of tries with the same input, those without a child are dropped when another one has a child; when none has, all but the latest.
    """
    parents = {turn.parent for turn in turns}
    tries: dict[str, list[int]] = {}
    for index, turn in enumerate(turns):
        if turn.digest:
            tries.setdefault(turn.digest, []).append(index)
    dropped: set[int] = set()
    for copies in tries.values():
        childless = [index for index in copies if index not in parents]
        if len(childless) == len(copies):
            childless.remove(max(copies, key=lambda index: (turns[index].created, index)))
        dropped.update(childless)
    return tuple(index for index in range(len(turns)) if index not in dropped)


def place_rewards(
    turns: Sequence[Turn],
    kept: Sequence[int],
    *,
    score: float | None = None,
    turn_rewards: Mapping[str, float] | None = None,
) -> TurnRewards:
    """Each turn's own reward: by its id, or the one score on the last turn that is kept.

    Raises:
        RewardError: an unknown id, both kinds at once, or no finite number.
    """
    given = dict(turn_rewards or {})
    if given and score is not None:
        # The score of an episode with turn rewards is a statistic; the turns' own rewards train.
        score = None
    numbers = [*given.values(), *(() if score is None else (score,))]
    if not all(math.isfinite(number) for number in numbers):
        raise RewardError(f"rewards: expected finite numbers, found {numbers}")
    unknown = given.keys() - {turn.id for turn in turns}
    if unknown:
        raise RewardError(f"turn_rewards: no call of the session has the id {min(unknown)!r}")
    values: list[float | None] = [given.get(turn.id) for turn in turns]
    if score is not None and kept:
        values[kept[-1]] = score
    return TurnRewards(values=tuple(values))


def discount_rewards(rewards: TurnRewards, discount: float, kept: Sequence[int] | None = None) -> TurnRewards:
    """reward[i] += discount · reward[i+1], newest to oldest in order of creation, over the turns that are kept.

    Branches make no difference: the order of creation rules. A turn without a reward counts as 0.

    Raises:
        RewardError: they are discounted already, or the discount is no number.
    """
    if rewards.discounted:
        raise RewardError("the rewards are discounted already: doing it again would count each reward twice")
    if not math.isfinite(discount):
        raise RewardError(f"discount: expected a finite number, found {discount}")
    values = list(rewards.values)
    later = 0.0
    for index in reversed(range(len(values)) if kept is None else kept):
        later = (values[index] or 0.0) + discount * later
        values[index] = later
    return TurnRewards(values=tuple(values), discounted=True)


def export_turns(turns: Sequence[Turn], kept: Sequence[int], style: Style) -> tuple[int, ...]:
    """The turns that become rows: with `concat` those that no answered, kept turn continues.

    Raises:
        RewardError: `concat` over turns whose prompts were rendered anew: their chains are no sequence of tokens.
    """
    answered = [index for index in kept if turns[index].complete]
    if style == "individual":
        return tuple(answered)
    anew = next((turns[index].id for index in answered if not turns[index].exact), None)
    if anew is not None:
        raise RewardError(f"concat needs prompts that reuse recorded ids: {anew!r} was rendered anew; use individual")
    continued = {turns[index].parent for index in answered}
    return tuple(index for index in answered if index not in continued)


def chain_of(turns: Sequence[Turn], leaf: int) -> tuple[int, ...]:
    """A turn with its ancestors, first to last."""
    chain = [leaf]
    while (parent := turns[chain[-1]].parent) is not None:
        if parent >= chain[-1]:
            raise RewardError(f"turn {chain[-1]} names turn {parent} as its parent, which came later")
        chain.append(parent)
    return tuple(reversed(chain))


def _row(
    interactions: Sequence[InteractionRecorded],
    tokens: Mapping[int, InteractionTokens],
    chain: tuple[int, ...],
    trained: frozenset[int],
) -> BuiltRow:
    pieces = [_piece(interactions[ordinal], tokens, train=ordinal in trained) for ordinal in chain]
    token_ids, mask, logprobs, versions, turns = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    last = interactions[chain[-1]]
    counted = versions[mask] if mask.any() else versions[versions >= 0]
    return BuiltRow(
        leaf=chain[-1],
        chain=chain,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        turns=turns,
        num_loss_tokens=int(mask.sum()),
        min_version=int(counted.min()) if counted.size else last.min_version,
        max_version=int(counted.max()) if counted.size else last.max_version,
        reward=None,
        turn_rewards=(),
        truncated=last.finish_reason is FinishReason.LENGTH,
        temperature=last.temperature,
    )


def _piece(
    interaction: InteractionRecorded, tokens: Mapping[int, InteractionTokens], *, train: bool
) -> tuple[npt.NDArray[np.generic], ...]:
    """One call's part of a row: ids, mask, log-probs, versions, turns."""
    given = tokens.get(interaction.ordinal)
    if given is None:
        raise RewardError(f"the payload of interaction {interaction.session}/{interaction.ordinal} is missing")
    prompt, completion = given.prompt_ids.as_numpy(), given.completion_ids.as_numpy()
    logprobs, versions = given.logprobs.as_numpy(), given.versions.as_numpy()
    sizes = (prompt.size, completion.size, logprobs.size, versions.size)
    expected = (interaction.num_prompt, *(interaction.num_completion,) * 3)
    if sizes != expected:
        raise RewardError(
            f"interaction {interaction.session}/{interaction.ordinal}: expected {expected} prompt ids, ids, log-probs and "
            f"versions, found {sizes}"
        )
    new = prompt.size
    return (
        np.concatenate((prompt, completion)).astype(np.int32),
        np.concatenate((np.zeros(new, np.bool_), np.full(completion.size, train and interaction.trainable))),
        np.concatenate((np.zeros(new, np.float32), logprobs.astype(np.float32))),
        np.concatenate((np.full(new, -1, np.int32), versions)),
        np.concatenate((np.full(new, -1, np.int32), np.full(completion.size, interaction.ordinal, np.int32))),
    )
