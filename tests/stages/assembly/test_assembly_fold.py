"""Membership, closing, dropping and stepping, one rule a test."""

import msgspec
import numpy as np
import pytest
from assembly_log import (
    advantages,
    closed,
    fold_all,
    issued,
    loss_weights,
    manifests,
    outputs_of,
    row,
    settings,
    steps,
    tick,
    trained,
    trajectory,
    whole_group,
)

from pipeline.errors import ContractError, RefusedError
from pipeline.fold import Fold
from schemas.payload import check_payload, inline_ref
from stages.assembly.advantages import Estimator, EstimatorSettings
from stages.assembly.filters import GroupView
from stages.assembly.fold import AssemblyFold
from stages.assembly.settings import AssemblySettings, RowsPerSlot, StaleRule
from stages.assembly.state import AssemblyState


def test_it_is_a_fold():
    fold: Fold[AssemblyState] = AssemblyFold(settings())
    assert fold.wants(tick(1)) is None
    assert list(fold.wanted_by(fold.initial())) == []


def test_a_group_closes_with_its_last_slot_and_becomes_a_step():
    messages = whole_group(0, [1, 0, 1, 0])
    fold = AssemblyFold(settings())
    state, before = fold_all(fold, messages[:-1])
    assert before == []
    after = fold.step(state, messages[-1])
    assert [type(output.message).__name__ for output in after] == ["GroupClosed", "StepAssembled"]
    assert (after[0].message.usable, after[0].message.num_usable) == (True, 4)
    assert after[1].message.groups == ["g0000000"]


def test_the_message_names_the_stored_manifest():
    (output,) = [output for output in outputs_of(whole_group(0, [1, 0])) if output.payloads]
    check_payload(output.message.manifest, output.payloads[0])
    (manifest,) = manifests([output])
    assert (manifest.run, manifest.step, output.message.num_rows) == ("run", 1, len(manifest.row_ids))


def test_what_has_ended_leaves_the_state():
    fold = AssemblyFold(settings(groups_per_step=2, slots_per_group=2))
    sizes = []
    state = fold.initial()
    for ordinal in range(200):
        for message in whole_group(ordinal, [1, 0]):
            fold.step(state, message)
        if ordinal % 2:
            fold.step(state, trained(ordinal // 2 + 1))
            sizes.append(len(msgspec.msgpack.encode(state)))
    assert state.num_groups_trained == 200
    assert max(sizes[5:]) - min(sizes[5:]) < 64  # numbers grow by digits, nothing else grows


def test_late_members_are_counted_and_change_nothing():
    messages = [*whole_group(0, [1, 0]), trajectory(0, 1, 5.0), trajectory(7, 0, 1.0)]
    state, outputs = fold_all(AssemblyFold(settings()), messages)
    assert state.num_late == 2
    assert len(outputs) == 2


def test_a_duplicate_member_is_counted_and_the_first_counts():
    messages = [issued(0, slots=2), trajectory(0, 0, 1.0), trajectory(0, 0, 9.0), trajectory(0, 1, 0.0)]
    state, outputs = fold_all(AssemblyFold(settings()), messages)
    assert state.num_duplicate == 1
    assert manifests(outputs)[0].reward.as_numpy().tolist() == [1.0, 0.0]


def test_a_group_that_was_issued_twice_opens_once():
    messages = whole_group(0, [1, 0])
    state, outputs = fold_all(AssemblyFold(settings()), [*messages, messages[0]])
    assert not state.open
    assert len(closed(outputs)) == 1


def test_ordinals_may_come_with_holes():
    fold = AssemblyFold(settings(groups_per_step=8))
    state, _ = fold_all(fold, [issued(ordinal) for ordinal in (3, 1, 0, 2, 6)])
    assert (state.issued_below, state.issued_above) == (4, [6])
    fold.step(state, issued(3))
    assert len(state.open) == 5


def test_a_slot_that_the_group_does_not_have_is_refused():
    with pytest.raises(RefusedError, match=r"slots 0 to 3.*slot 4"):
        outputs_of([issued(0), trajectory(0, 4, 1.0)])


def test_evaluation_groups_are_closed_and_never_trained():
    messages = [issued(0, slots=1, evaluation=True), trajectory(0, 0, 1.0)]
    state, outputs = fold_all(AssemblyFold(settings()), messages)
    assert [(one.usable, one.reason, one.evaluation) for one in closed(outputs)] == [(False, "evaluation", True)]
    assert (state.num_groups_evaluated, state.num_groups_dropped, steps(outputs)) == (1, 0, [])


def test_rejected_slots_don_t_vote():
    (manifest,) = manifests(
        outputs_of(whole_group(0, [1, None, 0]), estimator=EstimatorSettings(name=Estimator.DR_GRPO))
    )
    assert manifest.row_slot.as_numpy().tolist() == [0, 2]
    assert advantages(manifest) == [0.5, -0.5]
    assert manifest.stats["rejected_slots_failed"] == 1.0


def test_drop_incomplete_groups_comes_before_the_minimum():
    (one,) = closed(outputs_of(whole_group(0, [1, None, None, None]), drop_incomplete_groups=True))
    assert one.reason == "incomplete"


def test_a_group_of_one_slot_is_usable_where_one_is_asked():
    outputs = outputs_of(whole_group(0, [1.0]), slots_per_group=1)
    assert advantages(manifests(outputs)[0]) == [0.0]


def test_several_rows_where_one_is_allowed_end_the_run_and_name_the_remedies():
    rows = [row(0, 0, index, reward=1.0) for index in range(2)]
    with pytest.raises(ContractError, match=r"rows_per_slot = any.*compaction.*concat"):
        outputs_of([issued(0), trajectory(0, 0, 1.0, rows=rows)], rows_per_slot=RowsPerSlot.ONE)


@pytest.mark.parametrize(
    ("rewards", "changes", "reason"),
    [
        ([1, 1, 1], {"filter_zero_spread": True}, "zero_spread"),
        ([1, 0, 0, 0], {"min_accuracy": 0.5}, "accuracy"),
        ([1, 1, 1, 0], {"max_accuracy": 0.5}, "accuracy"),
        ([1, 0], {"min_accuracy": 0.5, "max_accuracy": 0.5}, ""),
    ],
)
def test_filters_say_what_they_dropped(rewards, changes, reason):
    assert closed(outputs_of(whole_group(0, rewards), **changes))[0].reason == reason


def test_a_filter_of_the_user_sees_the_group_and_names_its_reason():
    seen: list[GroupView] = []

    def too_long(view: GroupView) -> str | None:
        seen.append(view)
        return "too_long" if sum(slot.num_tokens for slot in view.slots) > 30 else None

    (one,) = closed(outputs_of(whole_group(0, [1, 0]), [too_long]))
    assert one.reason == "filter:too_long"
    assert [slot.reward for slot in seen[0].slots] == [1, 0]


def only_even(view: GroupView) -> str | None:
    return None if int(view.group[1:]) % 2 == 0 else "odd"


def wordless(view: GroupView):
    return 3


def test_filters_can_be_named_by_import_path():
    messages = [*whole_group(0, [1, 0]), *whole_group(1, [1, 0])]
    outputs = outputs_of(messages, user_filters_named=[f"{__name__}:only_even"])
    assert [one.reason for one in closed(outputs)] == ["", "filter:odd"]


def test_a_filter_that_returns_no_word_stops_the_fold():
    with pytest.raises(ContractError, match="returned 3"):
        outputs_of(whole_group(0, [1, 0]), user_filters_named=[f"{__name__}:wordless"])


def test_training_changes_no_manifest():
    messages = [m for ordinal in range(4) for m in whole_group(ordinal, [1, 0])]
    alone = outputs_of(messages, groups_per_step=2)
    beside = outputs_of([*messages[:4], trained(1), *messages[4:], trained(2)], groups_per_step=2)
    assert [output.payloads for output in beside] == [output.payloads for output in alone]


def test_a_group_without_a_token_to_train_is_dropped_as_masked():
    (one,) = closed(outputs_of(whole_group(0, [1, 0], num_loss_tokens=0)))
    assert one.reason == "masked"


def test_masked_truncated_rows_neither_vote_nor_train():
    messages = [issued(0, slots=3), trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), trajectory(0, 2, 9.0, truncated=True)]
    (manifest,) = manifests(
        outputs_of(messages, mask_truncated=True, estimator=EstimatorSettings(name=Estimator.DR_GRPO))
    )
    assert advantages(manifest) == [0.5, -0.5, 0.0]
    assert loss_weights(manifest) == [1 / 20, 1 / 20, 0.0]
    assert manifest.num_loss_tokens.as_numpy().tolist() == [10, 10, 0]
    assert (manifest.stats["usable_slots"], manifest.stats["trainable_slots"]) == (3, 2)


def test_a_step_stands_in_the_order_of_issue_whichever_group_closed_first():
    a, b = whole_group(0, [1, 0]), whole_group(1, [0, 1])
    (manifest,) = manifests(outputs_of([a[0], b[0], *b[1:], *a[1:]], groups_per_step=2))
    assert manifest.groups == ["g0000000", "g0000001"]


def test_surplus_groups_are_parked_for_the_next_step():
    messages = [message for ordinal in range(5) for message in whole_group(ordinal, [1, 0])]
    state, outputs = fold_all(AssemblyFold(settings(groups_per_step=2)), messages)
    assert [step.groups for step in steps(outputs)] == [["g0000000", "g0000001"], ["g0000002", "g0000003"]]
    assert list(state.waiting) == ["g0000004"]


def test_mini_batches_follow_the_order_of_groups():
    messages = [message for ordinal in range(4) for message in whole_group(ordinal, [1, 0])]
    (manifest,) = manifests(outputs_of(messages, groups_per_step=4, mini_batch_groups=2))
    assert manifest.mini_batch.as_numpy().tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert loss_weights(manifest) == [1 / 40] * 8


def test_a_dynamic_batch_trains_the_usable_ones_of_a_round():
    messages = [*whole_group(0, [1, 0]), *whole_group(1, [1, 1]), *whole_group(2, [0, 1])]
    outputs = outputs_of(messages, groups_per_step=3, dynamic_batch=True, filter_zero_spread=True)
    assert [step.groups for step in steps(outputs)] == [["g0000000", "g0000002"]]


def test_a_round_without_a_usable_group_makes_no_step():
    messages = [*whole_group(0, [1, 1]), *whole_group(1, [1, 1]), *whole_group(2, [0, 1]), *whole_group(3, [0, 1])]
    outputs = outputs_of(messages, groups_per_step=2, dynamic_batch=True, filter_zero_spread=True)
    assert [step.groups for step in steps(outputs)] == [["g0000002", "g0000003"]]


def test_a_stream_s_least_share_is_waited_for_while_it_has_open_groups():
    shares = {"groups_per_step": 2, "min_shares": {"code": 0.5}}
    opened = issued(2, slots=2, stream="code")
    math = [*whole_group(0, [1, 0]), *whole_group(1, [1, 0])]
    fold = AssemblyFold(settings(**shares))
    state, outputs = fold_all(fold, [opened, *math])
    assert steps(outputs) == []
    after = [fold.step(state, trajectory(2, slot, slot, stream="code")) for slot in (0, 1)][-1]
    assert steps(after)[0].groups == ["g0000000", "g0000002"]
    assert list(state.waiting) == ["g0000001"]


def test_a_stream_with_nothing_under_way_holds_up_nobody():
    messages = [*whole_group(0, [1, 0]), *whole_group(1, [1, 0])]
    (manifest,) = manifests(outputs_of(messages, groups_per_step=2, min_shares={"code": 0.5}))
    assert manifest.stats["missing_min_share_groups"] == 1.0


def test_a_stream_that_never_delivers_is_waited_for_one_round_at_most():
    opened = issued(99, slots=2, stream="code")
    math = [[opened], *(whole_group(ordinal, [1, 0]) for ordinal in range(4))]
    fold = AssemblyFold(settings(groups_per_step=2, min_shares={"code": 0.5}))
    state = fold.initial()
    made = [sum(len(steps(fold.step(state, message))) for message in messages) for messages in math]
    assert made == [0, 0, 0, 0, 1]


def test_the_deadline_closes_a_group_at_its_tick_and_not_before():
    fold = AssemblyFold(settings())
    state, outputs = fold_all(fold, [issued(0, deadline=3), trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), tick(2)])
    assert outputs == []
    assert [one.num_missing for one in closed(fold.step(state, tick(3)))] == [2]


def test_a_group_without_any_member_is_dropped_at_its_deadline():
    (one,) = closed(outputs_of([issued(0, deadline=1), tick(1)]))
    assert (one.usable, one.reason, one.num_missing) == (False, "too_few_usable", 4)


def test_a_tick_that_was_seen_changes_nothing():
    state, outputs = fold_all(AssemblyFold(settings()), [tick(5), issued(0, deadline=5), tick(5), tick(4)])
    assert outputs == []
    assert state.tick == 5


def stale_log():
    """Two steps of fresh groups around one group that waits with old rows in slot 0."""
    old = [
        issued(0, slots=3),
        trajectory(0, 0, 1.0),
        trajectory(0, 1, 0.0, min_version=5),
        trajectory(0, 2, 1.0, min_version=5),
    ]
    return [*old[:3], *whole_group(1, [1, 0], min_version=5), *whole_group(2, [1, 0], min_version=5), old[3]]


def test_a_slot_too_old_for_its_step_is_left_out_and_the_group_stays():
    messages = [*stale_log(), *whole_group(3, [1, 0], min_version=5)]
    outputs = outputs_of(messages, groups_per_step=2, max_staleness=0)
    assert manifests(outputs)[1].groups == ["g0000000", "g0000003"]
    assert manifests(outputs)[1].row_slot.as_numpy().tolist() == [1, 2, 0, 1]


def test_or_the_whole_group_goes():
    outputs = outputs_of(stale_log(), groups_per_step=2, max_staleness=0, stale=StaleRule.GROUP)
    assert closed(outputs)[-1].reason == "stale"


def test_what_waits_too_long_is_dropped_with_the_step_that_outran_it():
    parked = whole_group(2, [1, 0])
    share = [issued(3, slots=2, stream="code"), trajectory(3, 0, 1, stream="code"), trajectory(3, 1, 0, stream="code")]
    messages = [*whole_group(0, [1, 0]), *whole_group(1, [1, 0]), *parked]
    fold = AssemblyFold(settings(groups_per_step=2, max_staleness=0, min_shares={"code": 0.5}))
    state, outputs = fold_all(fold, [share[0], *messages[:6]])
    assert not steps(outputs)
    outputs += [output for message in share[1:] for output in fold.step(state, message)]
    (step,) = steps(outputs)
    assert step.groups == ["g0000000", "g0000003"]
    assert [(one.group, one.reason) for one in step.dropped] == [("g0000001", "stale")]
    assert not state.waiting


def test_dropped_groups_are_on_the_next_manifest_once():
    messages = [*whole_group(0, [None] * 2), *whole_group(1, [1, 0]), *whole_group(2, [1, 0])]
    first, second = manifests(outputs_of(messages))
    assert [(one.group, one.stream, one.reason) for one in first.dropped] == [("g0000000", "math", "too_few_usable")]
    assert second.dropped == []


def test_steps_count_as_trained_once_whoever_trains_them_again():
    messages = [
        *whole_group(0, [1, 0]),
        trained(1),
        trained(1, generation=2),
        *whole_group(1, [1, 0]),
        trained(2, generation=2),
    ]
    state, _ = fold_all(AssemblyFold(settings()), messages)
    assert (state.num_groups_trained, state.in_training, state.num_trained) == (2, {}, 2)


def test_rows_inside_the_message_can_t_be_named_by_a_manifest():
    inside = row(0, 0, reward=1.0, tokens=inline_ref(b"tokens"))
    with pytest.raises(ContractError, match="payload store"):
        outputs_of([issued(0, slots=1), trajectory(0, 0, 1.0, rows=[inside])], slots_per_group=1)


def test_another_message_is_refused():
    with pytest.raises(ContractError, match="does not consume Row"):
        outputs_of([row(0, 0)])


def test_settings_of_one_run_are_checked_when_the_fold_is_made():
    with pytest.raises(ValueError, match="groups_per_step"):
        AssemblyFold(AssemblySettings(run="run", groups_per_step=0, slots_per_group=1))


def test_a_manifest_s_columns_have_one_entry_a_row():
    (manifest,) = manifests(outputs_of(whole_group(0, [1, 0, 1])))
    for name in manifest.__struct_fields__:
        column = getattr(manifest, name)
        if hasattr(column, "as_numpy"):
            assert np.shape(column.as_numpy()) == (3,), name
    assert len(manifest.payload_ids) == len(manifest.row_ids) == 3


def test_a_superseded_trainers_step_trains_nothing():
    fold = AssemblyFold(settings(groups_per_step=1, slots_per_group=2))
    messages = [message for ordinal in range(4) for message in whole_group(ordinal, [1, 0])]
    state, _ = fold_all(fold, [*messages, trained(1, 1), trained(2, 2), trained(4, 1)])
    assert (state.num_trained, state.num_groups_trained) == (2, 2)
    fold.step(state, trained(3, 2))
    assert (state.num_trained, state.num_groups_trained) == (3, 3)
