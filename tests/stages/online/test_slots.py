"""Which session plays which slot: decided by the log's order alone."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas.messages.rollout import EpisodeClass, EpisodeEnded, SessionClaimed, SessionClosed, SessionRewarded
from schemas.messages.sampling import EpisodeRequested, GroupClosed
from schemas.payload import PayloadRef
from stages.online.slots import OnlineSlots

ROW = PayloadRef(store="run", id="x", size_bytes=1)


def requested(group: str, slot: int, attempt: int = 0, *, stream: str = "s", data_id: str = "0", row=None):
    return EpisodeRequested(group=group, slot=slot, attempt=attempt, stream=stream, data_id=data_id, prompt=row)


def claimed(claim: str, task: str = "", ordinal: int = 0, stream: str = "s") -> SessionClaimed:
    return SessionClaimed(claim=claim, ordinal=ordinal, stream=stream, task=task, gateway="gw")


def ended(group: str, slot: int, attempt: int = 0, *, final: bool = True) -> EpisodeEnded:
    return EpisodeEnded(
        group=group,
        slot=slot,
        attempt=attempt,
        stream="s",
        data_id="0",
        session=f"{group}-{slot}-{attempt}-0",
        outcome=EpisodeClass.SCORED,
        final=final,
        status="DONE",
    )


def closed(group: str) -> GroupClosed:
    return GroupClosed(group=group, stream="s", usable=True)


def folded(*messages: msgspec.Struct) -> OnlineSlots:
    slots = OnlineSlots(["s"])
    for number, message in enumerate(messages):
        slots.take(message, float(number))
    return slots


def two_groups(row: PayloadRef | None = None) -> list[msgspec.Struct]:
    return [requested(f"g{group}", slot, data_id=f"row-{group}", row=row) for group in range(2) for slot in range(2)]


def test_sessions_without_a_task_fill_one_group_after_the_other() -> None:
    slots = folded(*two_groups(), *(claimed(name) for name in "abc"))
    assert [slots.asked(name)[1] for name in "abc"] == ["g0-0-0-0", "g0-1-0-0", "g1-0-0-0"]


def test_sessions_of_one_task_share_a_group_and_others_keep_out_of_it() -> None:
    slots = folded(
        *two_groups(), claimed("a", "x"), claimed("b", "y"), claimed("c", "x"), claimed("d", "y"), claimed("e", "x")
    )
    assert [slots.asked(name)[1] for name in "abcd"] == ["g0-0-0-0", "g1-0-0-0", "g0-1-0-0", "g1-1-0-0"]
    assert slots.asked("e") == (1, "")
    assert slots.num_void == 1


def test_a_row_that_is_handed_out_is_its_groups_task() -> None:
    slots = folded(*two_groups(ROW), claimed("a"), claimed("b", "row-1"), claimed("c", "row-7"), claimed("d"))
    assert [slots.asked(name)[1] for name in "abcd"] == ["g0-0-0-0", "g1-0-0-0", "", "g0-1-0-0"]


def test_a_void_claim_may_be_made_again_and_a_granted_one_gives_the_same_session() -> None:
    slots = folded(claimed("a"), *two_groups(), claimed("a", ordinal=1), claimed("a", ordinal=2))
    assert slots.asked("a") == (2, "g0-0-0-0")
    assert slots.num_free("s") == 3


def test_a_slot_whose_attempt_failed_waits_for_another_session_of_its_task() -> None:
    slots = folded(requested("g0", 0), claimed("a", "x"), ended("g0", 0, final=False))
    assert list(slots.owed.values()) == [requested("g0", 0, 1)]
    slots.take(requested("g0", 0, 1), 9.0)
    assert not slots.owed
    assert slots.find("s", "y") is None
    slots.take(claimed("b", "x"), 10.0)
    assert slots.asked("b")[1] == "g0-0-1-0"


def test_the_slots_of_a_closed_group_are_gone_and_its_sessions_know() -> None:
    slots = folded(*two_groups(), claimed("a"), closed("g0"), requested("g0", 0, 1))
    assert slots.held["g0-0-0-0"].group_closed
    assert slots.num_free("s") == 2
    early = folded(closed("g5"), requested("g5", 0))
    assert early.num_free("s") == 0


def test_later_rewards_go_before_former_ones_and_gaps_are_passed_over() -> None:
    def said(ordinal: int, **values) -> SessionRewarded:
        return SessionRewarded(session="g0-0-0-0", ordinal=ordinal, **values)

    slots = folded(
        requested("g0", 0),
        claimed("a"),
        said(0, score=0.25, final=False),
        said(2, score=9.0),
        said(1, turn_rewards={"c1": 1.0}),
        SessionClosed(session="g0-0-0-0", num_interactions=1),
    )
    held = slots.held["g0-0-0-0"]
    assert (held.score, held.turn_rewards, held.final, held.closed_s) == (0.25, {"c1": 1.0}, True, 5.0)


events = st.lists(
    st.one_of(
        st.builds(claimed, st.sampled_from("abcdefgh"), st.sampled_from(["", "x", "y"]), st.integers(0, 2)),
        st.builds(requested, st.sampled_from(["g0", "g1", "g2"]), st.integers(0, 2), st.integers(0, 1)),
        st.builds(
            ended, st.sampled_from(["g0", "g1", "g2"]), st.integers(0, 2), st.integers(0, 1), final=st.booleans()
        ),
        st.builds(closed, st.sampled_from(["g0", "g1"])),
    ),
    max_size=60,
)


@given(events)
def test_a_slot_is_played_by_one_session_and_a_group_by_one_task(log: list[msgspec.Struct]) -> None:
    slots = OnlineSlots(["s"])
    claims: dict[str, str] = {}
    tasks: dict[str, set[str]] = {}
    for number, message in enumerate(log):
        before = set(slots.held)
        slots.take(message, float(number))
        new = set(slots.held) - before
        assert len(new) <= (1 if isinstance(message, SessionClaimed) else 0)
        for session in new:
            held = slots.held[session]
            assert held.claim not in claims, "a claim has one session, whatever becomes of it"
            claims[held.claim] = session
            tasks.setdefault(held.requested.group, set()).add(held.task)
        free = {(name, *key) for name, group in slots.groups.items() for key in group.free}
        playing = {(h.requested.group, h.requested.slot, h.requested.attempt) for h in slots.held.values()}
        assert not free & playing
    assert all(len(found) == 1 for found in tasks.values())
    again = OnlineSlots(["s"])
    for number, message in enumerate(log):
        again.take(message, float(number))
    assert again.held == slots.held
