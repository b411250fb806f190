"""What `turn_rewards.json` says about trees of calls, discounting, retries, exports and row tensors, case by case.

The reference keeps nodes of messages; here parents are found by the gateway's own digests, rows are made by `stages.rewards.forest`.
The reference has no ownership of shared tokens: `shared_tokens="all"` is its behaviour.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from golden_case import Case, assert_close

from schemas.arrays import float32, int32, runs
from schemas.messages.rollout import FinishReason, InteractionRecorded, InteractionTokens
from schemas.payload import inline_ref
from stages.gateway.conversation import Message
from stages.gateway.matching import extend_digest, message_digest, root_digest
from stages.rewards.forest import (
    RewardError,
    Turn,
    TurnRewards,
    build_rows,
    chain_of,
    discount_rewards,
    export_turns,
    keep_turns,
)

_NODE_KEYS = {
    "id", "messages", "output", "reward", "created", "template", "tokens_in", "tokens_out", "logprobs", "versions",
}  # fmt: skip


def _nodes(case: Case) -> list[dict[str, Any]]:
    nodes: Any = case.inputs["nodes"]
    for node in nodes:
        assert set(node) <= _NODE_KEYS, f"unknown keys of a node: {sorted(set(node) - _NODE_KEYS)}"
    return nodes


def _param(case: Case, key: str, default: Any = None) -> Any:
    return case.params.get(key, default)


def _digest(before: bytes, messages: list[dict[str, Any]]) -> bytes:
    for message in messages:
        assert set(message) <= {"role", "content"}
        before = extend_digest(before, message_digest(Message(role=message["role"], texts=(message["content"],)), {}))
    return before


def _turns(nodes: list[dict[str, Any]], template: str) -> list[Turn]:
    answered: dict[bytes, int] = {}
    turns: list[Turn] = []
    for index, node in enumerate(nodes):
        parent, digest = None, root_digest(())
        for message in node["messages"]:
            digest = _digest(digest, [message])
            parent = answered.get(digest, parent)
        turns.append(
            Turn(
                id=node["id"],
                parent=parent,
                digest=digest.hex(),
                created=node["created"],
                complete=node["output"] is not None,
                exact=node.get("template", template) == "concat",
            )
        )
        if node["output"] is not None:
            answered.setdefault(_digest(digest, node["output"]), index)
    return turns


def _sum(nodes: list[dict[str, Any]]) -> float:
    return sum(node["reward"] or 0.0 for node in nodes)


def _check_export(case: Case) -> None:
    nodes = _nodes(case)
    turns = _turns(nodes, _param(case, "template", "concat"))
    expected = case.expected
    ids = [turn.id for turn in turns]
    parents: Any = expected["parents"]
    for turn in turns:
        assert (None if turn.parent is None else ids[turn.parent]) == parents[turn.id]
    assert sorted(parents) == sorted(ids)
    drop = bool(_param(case, "drop", default=False))
    kept = keep_turns(turns) if drop else tuple(range(len(turns)))
    dropped: Any = expected["dropped"]
    assert [ids[index] for index in range(len(turns)) if index not in kept] == (dropped or [])
    assert_close(_sum(nodes), expected["total_reward_before"], case, "loss", "total before")
    assert_close(_sum([nodes[index] for index in kept]), expected["total_reward_after"], case, "loss", "total after")
    rewards = TurnRewards(values=tuple(node["reward"] for node in nodes))
    discount = _param(case, "discount")
    if discount is not None:
        rewards = discount_rewards(rewards, discount, kept)
    exported = export_turns(turns, kept, _param(case, "style", "individual"))
    assert [ids[index] for index in exported] == expected["exported"]
    wanted: Any = expected["rewards"]
    assert sorted(wanted) == sorted(ids[index] for index in exported)
    for index in exported:
        value = rewards.values[index]
        assert (value is None) == (wanted[ids[index]] is None)
        if value is not None:
            assert_close(value, wanted[ids[index]], case, "loss", f"reward of {ids[index]}")
    if "tensors" in expected and expected["tensors"] is not None:
        _check_tensors(case, nodes, turns, rewards)
    else:
        assert not _param(case, "tensors", default=False)


def _check_tensors(case: Case, nodes: list[dict[str, Any]], turns: list[Turn], rewards: TurnRewards) -> None:
    """Rows' tokens. With the `hf` template prompts are rendered anew: each call is a chain of its own."""
    assert case.params["tensors"]
    exact = all(turn.exact for turn in turns)
    interactions, tokens = [], {}
    for index, (node, turn) in enumerate(zip(nodes, turns, strict=True)):
        parent = turn.parent if exact else None
        known = 0 if parent is None else len(nodes[parent]["tokens_in"]) + len(nodes[parent]["tokens_out"])
        tokens[index] = InteractionTokens(
            prompt_ids=int32(node["tokens_in"][known:]),
            completion_ids=int32(node["tokens_out"]),
            logprobs=float32(node["logprobs"]),
            versions=runs(node["versions"]),
        )
        interactions.append(
            InteractionRecorded(
                session="s", ordinal=index, interaction_id=turn.id, parent=parent, tokens=inline_ref(b""), num_context=known,
                num_prompt=len(node["tokens_in"]) - known, num_completion=len(node["tokens_out"]),
                min_version=min(node["versions"]), max_version=max(node["versions"]), finish_reason=FinishReason.STOP,
                digest=turn.digest,
            )
        )  # fmt: skip
    rows = build_rows(
        interactions,
        tokens,
        style=_param(case, "style", "individual"),
        shared_tokens="all",
        drop_retries=bool(_param(case, "drop", default=False)),
        turn_rewards={node["id"]: node["reward"] for node in nodes if node["reward"] is not None},
        discount=_param(case, "discount"),
    )
    expected: Any = case.expected["tensors"]
    assert [turns[row.leaf].id for row in rows] == list(expected)
    for row in rows:
        wanted = expected[turns[row.leaf].id]
        places = {ordinal: place for place, ordinal in enumerate(row.chain)}
        assert row.token_ids.tolist() == wanted["input_ids"]
        assert row.loss_mask.astype(int).tolist() == wanted["loss_mask"]
        assert row.versions.tolist() == wanted["versions"]
        assert [places.get(int(turn), -1) for turn in row.turns] == wanted["turn_ids"]
        assert_close(row.logprobs, wanted["logprobs"], case, "token", "log-probs")
        assert [1] * row.token_ids.size == wanted["attention_mask"]
        for key in ("rewards", "original_rewards"):
            assert_close([rewards.values[row.leaf]], wanted[key], case, "loss", key)
        assert_close([row.reward], wanted["rewards"], case, "loss", "reward of the row")
        assert chain_of(turns, row.leaf)[-1] == row.leaf
        assert np.array_equal(row.turns >= 0, row.versions >= 0)


def _check_error(case: Case) -> None:
    assert case.expected["error"]
    with pytest.raises(RewardError, match=r"again|rendered anew"):
        _provoke(case)


def _provoke(case: Case) -> None:
    rewards = TurnRewards(values=(0.0, 1.0))
    for step in _param(case, "steps", []):
        assert step == "apply_reward_discount", f"unknown step {step}"
        rewards = discount_rewards(rewards, _param(case, "discount", 1.0))
    if "nodes" in case.inputs:
        turns = _turns(_nodes(case), _param(case, "template", "concat"))
        export_turns(turns, tuple(range(len(turns))), _param(case, "style", "individual"))


CHECKS: dict[str, Callable[[Case], None]] = {
    "discount": _check_export,
    "export": _check_export,
    "retry": _check_export,
    "tensors": _check_export,
    "error": _check_error,
}
