from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.recording.references import NamedPayload
from pipeline.room import (
    MESSAGE_OVERHEAD_BYTES,
    NO_LIMIT,
    PAYLOAD_OVERHEAD_BYTES,
    USABLE_SHARE,
    Fill,
    GroupSizes,
    Room,
    room,
)
from schemas.messages.sampling import GroupClosed, GroupIssued
from schemas.messages.training import DroppedGroup, StepAssembled, StepTrained
from schemas.payload import PayloadRef

REF = PayloadRef(store="run", id="0" * 32, size_bytes=1)
UNLIMITED = Fill(used_bytes=10**9, limit_bytes=-1)


def name(number: int) -> str:
    return f"g{number:07d}"


def payload(number: int, size_bytes: int) -> NamedPayload:
    return NamedPayload(ref=PayloadRef(store="run", id=f"{number:032x}", size_bytes=size_bytes), path="x")


def issue(sizes: GroupSizes, number: int) -> None:
    sizes.take(GroupIssued(group=name(number), ordinal=number, stream="s", data_id="1", num_slots=2))


def close(sizes: GroupSizes, number: int, *, usable: bool = True) -> None:
    sizes.take(GroupClosed(group=name(number), stream="s", usable=usable))


def train(sizes: GroupSizes, step: int, *groups: int, dropped: tuple[int, ...] = ()) -> None:
    sizes.take(
        StepAssembled(
            step=step,
            manifest=REF,
            groups=[name(number) for number in groups],
            dropped=[DroppedGroup(group=name(number), stream="s", reason="stale") for number in dropped],
            num_rows=1,
            num_tokens=1,
            num_mini_batches=1,
            min_version=0,
            mean_reward=0.0,
        )
    )
    sizes.take(StepTrained(step=step, generation=1, digest="", manifest_id=""))


def payload_room(sizes: GroupSizes, used: int, limit: int) -> Room:
    found = room(sizes.taken(), UNLIMITED, Fill(used_bytes=used, limit_bytes=limit))
    assert found is not None
    return found


def test_nothing_is_said_before_a_group_has_ended():
    sizes = GroupSizes(trains=True)
    issue(sizes, 0)
    sizes.add(f"{name(0)}-0-0-0", 100, [payload(1, 1000)])
    close(sizes, 0)
    assert room(sizes.taken(), UNLIMITED, Fill(used_bytes=0, limit_bytes=10**6)) is None
    train(sizes, 1, 0)
    assert payload_room(sizes, 1501, 10**6).group_bytes == 1000 + PAYLOAD_OVERHEAD_BYTES + 251, (
        "the step's manifest is its groups'"
    )


def test_a_group_is_as_large_as_the_largest_of_the_last_ones_and_those_under_way():
    sizes = GroupSizes(trains=True)
    for number, size in ((0, 1000), (1, 5000)):
        issue(sizes, number)
        sizes.add(name(number), 0, [payload(number, size)])
    close(sizes, 0, usable=False)
    assert payload_room(sizes, 6500, 100_000).group_bytes == 5250
    sizes.add(f"{name(1)}-1-0-0", 0, [payload(7, 3000), payload(1, 5000)])
    assert payload_room(sizes, 9750, 100_000).group_bytes == 5250 + 3250, "a payload is stored once"


def test_the_smaller_of_the_two_stores_binds():
    sizes = GroupSizes(trains=False)
    issue(sizes, 0)
    sizes.add(name(0), 1000 - MESSAGE_OVERHEAD_BYTES, [payload(0, 1000 - PAYLOAD_OVERHEAD_BYTES)])
    close(sizes, 0)
    small, large = Fill(used_bytes=0, limit_bytes=10_000), Fill(used_bytes=0, limit_bytes=10**6)
    for log, payloads in ((small, large), (large, small)):
        found = room(sizes.taken(), log, payloads)
        assert found is not None
        assert found.groups == 9


def test_room_is_kept_for_the_next_weights():
    sizes = GroupSizes(trains=False)
    issue(sizes, 0)
    sizes.add(name(0), 0, [payload(0, 1000 - PAYLOAD_OVERHEAD_BYTES)])
    close(sizes, 0)
    sizes.add("7", 0, [payload(8, 2000 - PAYLOAD_OVERHEAD_BYTES), payload(9, 2000 - PAYLOAD_OVERHEAD_BYTES)])
    assert payload_room(sizes, 4000, 20_000).groups == (18_000 - 4000 - 4000) // 1000


def test_dropped_groups_leave_and_what_is_under_way_counts_as_large_as_the_largest():
    sizes = GroupSizes(trains=True)
    for number, size in enumerate((750, 1750, 250)):
        issue(sizes, number)
        sizes.add(name(number), 0, [payload(number, size)])
        close(sizes, number)
    train(sizes, 1, 0, dropped=(1,))
    assert (sizes.taken().num_issued, sizes.taken().num_under_way) == (3, 1)
    assert payload_room(sizes, 3500, 10_000).free_bytes == 9000 - 3500 - (2000 - 500)


def test_a_store_without_limits_has_room_for_any_number():
    sizes = GroupSizes(trains=False)
    issue(sizes, 0)
    close(sizes, 0)
    assert room(sizes.taken(), UNLIMITED, UNLIMITED) == NO_LIMIT


@given(st.lists(st.integers(100, 3000), min_size=1, max_size=40), st.integers(5_000, 60_000), st.booleans())
def test_groups_that_are_let_in_by_it_never_fill_the_store_beyond_its_usable_share(
    groups: list[int], limit: int, purging: bool
) -> None:
    """Groups are issued as long as there is room and grow to their size, none larger than one that was seen before; whether what is
    trained is purged makes no difference to that.
    """
    sizes = GroupSizes(trains=True)
    issue(sizes, 0)
    sizes.add(name(0), 0, [payload(0, max(groups))])
    close(sizes, 0, usable=False)
    used, number = 0, 1
    while groups:
        places = payload_room(sizes, used, limit).groups
        if not places:
            return
        begun = [groups.pop() for _ in range(min(len(groups), places))]
        for place, size in enumerate(begun):
            issue(sizes, number + place)
            for part in range(2):
                sizes.add(f"{name(number + place)}-{part}-0-0", 0, [payload(1000 * (number + place) + part, size // 2)])
                used += size // 2 + PAYLOAD_OVERHEAD_BYTES
            assert used <= USABLE_SHARE * limit + 2 * PAYLOAD_OVERHEAD_BYTES * len(begun)
            close(sizes, number + place)
        train(sizes, number, *range(number, number + len(begun)))
        number += len(begun)
        used = 0 if purging else used
