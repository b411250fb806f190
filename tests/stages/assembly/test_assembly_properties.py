"""What must hold whatever arrives in whatever order: the same numbers to the last bit, one end for every group, the same bytes."""

import math
from collections import Counter

import msgspec
import numpy as np
from assembly_log import closed, fold_all, issued, manifests, row, settings, started, steps, tick, trained, trajectory
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from schemas.messages.sampling import Control, ControlAction, GroupIssued
from stages.assembly.advantages import Estimator, EstimatorSettings
from stages.assembly.fold import AssemblyFold
from stages.assembly.normalization import Level, Normalization
from stages.assembly.partition import MicroBatchPacking, PartitionSettings, RankBalance, partition
from stages.assembly.settings import uses_group_statistics
from stages.assembly.state import AssemblyState
from stages.assembly.weights import Aggregation

REWARDS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-3, 3, width=32))


@st.composite
def group_members(draw, ordinal: int):
    """The trajectories of one group: several rows, rejected slots, empty masks."""
    slots = draw(st.integers(2, 5))
    found = []
    for slot in range(slots):
        reward = draw(REWARDS)
        if draw(st.integers(0, 7)) == 0:
            found.append(trajectory(ordinal, slot, None, rejected="failed"))
            continue
        rows = [
            row(
                ordinal,
                slot,
                index,
                reward=reward,
                num_loss_tokens=draw(st.integers(0, 400)),
                num_tokens=draw(st.integers(400, 900)),
            )
            for index in range(draw(st.integers(1, 3)))
        ]
        found.append(trajectory(ordinal, slot, reward, rows=rows))
    return found


@st.composite
def batches(draw):
    groups = [draw(group_members(ordinal)) for ordinal in range(draw(st.integers(1, 6)))]
    mode = draw(st.sampled_from(Aggregation))
    configured = settings(
        groups_per_step=len(groups),
        slots_per_group=5,
        mini_batch_groups=draw(st.sampled_from([n for n in range(1, len(groups) + 1) if len(groups) % n == 0])),
        estimator=EstimatorSettings(name=draw(st.sampled_from(Estimator)), ddof=draw(st.integers(0, 1))),
        reward_normalization=draw(
            st.builds(
                Normalization,
                mean=st.sampled_from(Level),
                std=st.sampled_from(Level),
                leave_one_out=st.booleans(),
                ddof=st.integers(0, 1),
            )
        ),
        aggregation=mode,
        aggregation_divisor=64.0 if mode is Aggregation.CONSTANT else None,
        min_usable_group_size=None,
    )
    if not uses_group_statistics(configured):
        # A step of lone members is no mistake of these settings: say so, as a user would.
        configured = msgspec.structs.replace(configured, min_usable_group_size=1)
    return groups, configured, draw(st.randoms(use_true_random=False))


def log_of(groups):
    return [issued(ordinal, slots=len(members)) for ordinal, members in enumerate(groups)], [
        member for members in groups for member in members
    ]


@budget(max_examples=120, deadline=None)
@given(batches())
def test_the_order_of_arrival_changes_no_bit_of_a_step(drawn):
    groups, configured, random = drawn
    opened, members = log_of(groups)
    _, outputs = fold_all(AssemblyFold(configured), [*opened, *members])
    shuffled = list(members)
    random.shuffle(shuffled)
    _, again = fold_all(AssemblyFold(configured), [*opened, *shuffled])
    for one, other in zip(manifests(outputs), manifests(again), strict=True):
        assert other.row_ids == one.row_ids
        for column in ("advantage", "loss_weight", "mini_batch", "reward"):
            assert bytes(getattr(other, column).data) == bytes(getattr(one, column).data)
        assert np.all(np.isfinite(one.advantage.as_numpy()))
        assert other.stats == one.stats


@budget(max_examples=80, deadline=None)
@given(
    batches(),
    st.integers(1, 64),
    st.integers(1, 3000),
    st.sampled_from(RankBalance),
    st.sampled_from(MicroBatchPacking),
)
def test_the_step_loss_is_the_same_over_any_ranks_and_any_budget(drawn, ranks, max_tokens, balance, packing):
    groups, configured, random = drawn
    opened, members = log_of(groups)
    _, outputs = fold_all(AssemblyFold(configured), [*opened, *members])
    chosen = PartitionSettings(max_tokens_per_microbatch=max_tokens, balance=balance, packing=packing)
    for manifest in manifests(outputs):
        weights, minis = manifest.loss_weight.as_numpy(), manifest.mini_batch.as_numpy()
        row_losses = [random.uniform(-5, 5) * count for count in manifest.num_loss_tokens.as_numpy().tolist()]
        skip = weights == 0.0
        plan = partition(manifest.num_tokens.as_numpy(), minis, manifest.row_group.as_numpy(), ranks, chosen, skip=skip)
        for mini in range(int(minis.max()) + 1):
            whole = math.fsum(weights[i] * row_losses[i] for i in np.flatnonzero(minis == mini))
            parts = [sum(weights[i] * row_losses[i] for micro in rank[mini] for i in micro) for rank in plan.ranks]
            assert math.isclose(sum(parts), whole, rel_tol=1e-6, abs_tol=1e-6)
            dealt = Counter(i for rank in plan.ranks for micro in rank[mini] for i in micro)
            assert dealt == Counter(np.flatnonzero((minis == mini) & ~skip).tolist())


LENGTHS = st.lists(st.integers(1, 5000), min_size=0, max_size=80)


@budget(max_examples=150, deadline=None)
@given(
    LENGTHS,
    st.integers(1, 64),
    st.integers(1, 6000),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(RankBalance),
    st.integers(1, 4),
)
def test_a_partition_keeps_its_promises(lengths, ranks, max_tokens, multiple, pipeline, balance, num_minis):
    minis = [index * num_minis // max(1, len(lengths)) for index in range(len(lengths))]
    groups = [index // 4 for index in range(len(lengths))]
    rules = PartitionSettings(
        max_tokens_per_microbatch=max_tokens, tokens_multiple=multiple, microbatch_multiple=pipeline, balance=balance
    )
    plan = partition(lengths, minis, groups, ranks, rules)
    assert plan == partition(lengths, minis, groups, ranks, rules)
    padded = [-(-length // multiple) * multiple for length in lengths]
    for mini in range(max(minis, default=-1) + 1):
        counts = [sum(map(len, rank[mini])) for rank in plan.ranks]
        assert max(counts) - min(counts) <= 1
        slots = {len(rank[mini]) for rank in plan.ranks}
        assert len(slots) == 1
        assert slots.pop() % pipeline == 0
        for micro in (micro for rank in plan.ranks for micro in rank[mini]):
            assert len(micro) == 1 or sum(padded[index] for index in micro) <= max_tokens
    everyone = sorted(index for rank in plan.ranks for mini in rank for micro in mini for index in micro)
    assert everyone == list(range(len(lengths)))
    assert plan.overlong_rows == [index for index, length in enumerate(padded) if length > max_tokens]


@st.composite
def histories(draw):
    """A log with late, duplicate, rejected, missing and stale members, deadlines, evaluation groups, several streams and trained steps."""
    messages: list[msgspec.Struct] = []
    pending: list[msgspec.Struct] = []
    ticks = step = 0
    for ordinal in range(draw(st.integers(1, 14))):
        stream = draw(st.sampled_from(["math", "code"]))
        slots = draw(st.integers(1, 4))
        opened = issued(
            ordinal,
            slots=slots,
            stream=stream,
            deadline=ticks + draw(st.integers(1, 4)),
            evaluation=draw(st.integers(0, 9)) == 0,
        )
        messages.append(opened)
        for slot in range(slots):
            reward = draw(st.sampled_from([0.0, 0.5, 1.0, None]))
            version = draw(st.integers(0, 3))
            member = trajectory(
                ordinal,
                slot,
                reward,
                stream=stream,
                rejected="failed" if reward is None else "",
                min_version=version,
                max_version=version,
                num_loss_tokens=draw(st.sampled_from([0, 7, 11])),
            )
            fate = draw(st.integers(0, 9))
            pending += [] if fate == 0 else [member, member] if fate == 1 else [member]
        pending = draw(st.permutations(pending))
        take = draw(st.integers(0, len(pending)))
        messages += pending[:take]
        pending = pending[take:]
        if draw(st.booleans()):
            ticks += 1
            messages.append(tick(ticks))
        if draw(st.integers(0, 4)) == 0:
            step += 1
            messages += [trained(step), opened]
        if draw(st.integers(0, 9)) == 0:
            action = draw(st.sampled_from(ControlAction))
            messages += [started(ordinal), Control(id=str(ordinal), action=action)]
    return [*messages, *pending]


BATCHING = [{}, {"dynamic_batch": True}, {"min_shares": {"code": 0.3}}]
HISTORY_SETTINGS = st.builds(
    lambda batching, **changes: settings(**batching, **changes),
    st.sampled_from(BATCHING),
    groups_per_step=st.integers(1, 3),
    max_staleness=st.sampled_from([None, 0, 1]),
    filter_zero_spread=st.booleans(),
    drop_incomplete_groups=st.booleans(),
    min_usable_group_size=st.just(1),
    estimator=st.just(EstimatorSettings(name=Estimator.REINFORCE)),
)


@budget(max_examples=150, deadline=None)
@given(histories(), HISTORY_SETTINGS)
def test_every_issued_group_ends_in_exactly_one_way(messages, configured):
    state, outputs = fold_all(AssemblyFold(configured), messages)
    everyone = {message.group for message in messages if isinstance(message, GroupIssued)}
    evaluated = {one.group for one in closed(outputs) if one.evaluation}
    dropped_at_close = {one.group for one in closed(outputs) if not one.usable} - evaluated
    dropped_later = {one.group for step in steps(outputs) for one in step.dropped} - dropped_at_close
    in_steps = [group for step in steps(outputs) for group in step.groups]
    ends = Counter([*evaluated, *dropped_at_close, *dropped_later, *in_steps, *state.open, *state.waiting])
    # What was dropped since the last step is named by its closing; what a step dropped later had closed as usable.
    assert set(ends) == everyone
    assert set(ends.values()) <= {1}
    assert len([one.group for one in closed(outputs)]) == len({one.group for one in closed(outputs)})
    assert state.num_groups_dropped == len(dropped_at_close | dropped_later)
    named = [one.group for step in steps(outputs) for one in step.dropped] + [one.group for one in state.dropped]
    assert sorted(named) == sorted(dropped_at_close | dropped_later)


@budget(max_examples=120, deadline=None)
@given(histories(), HISTORY_SETTINGS, st.lists(st.integers(0, 80), max_size=4))
def test_folding_again_and_after_kills_gives_the_same_bytes(messages, configured, kills):
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(AssemblyState)
    fold = AssemblyFold(configured)
    _, once = fold_all(fold, messages)
    state, again = fold.initial(), []
    for position, message in enumerate(messages):
        if position in kills:
            fold = AssemblyFold(configured)
            state = decoder.decode(encoder.encode(state))
        again += fold.step(state, message)
    assert [(encoder.encode(o.message), o.payloads) for o in again] == [
        (encoder.encode(o.message), o.payloads) for o in once
    ]
    _, whole = fold_all(AssemblyFold(configured), messages)
    assert encoder.encode([o.message for o in whole]) == encoder.encode([o.message for o in once])


@budget(max_examples=100, deadline=None)
@given(histories(), HISTORY_SETTINGS)
def test_no_step_trains_a_row_that_is_too_old(messages, configured):
    _, outputs = fold_all(AssemblyFold(configured), messages)
    for manifest in manifests(outputs):
        if configured.max_staleness is not None:
            active = manifest.loss_weight.as_numpy() > 0
            assert np.all(manifest.step - 1 - manifest.min_version.as_numpy()[active] <= configured.max_staleness)
