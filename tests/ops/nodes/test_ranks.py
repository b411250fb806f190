"""How the launchers of a trainer over several nodes agree: the pure part."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.nodes.ranks import (
    Coordinator,
    GroupPhase,
    LeaderWord,
    MemberPhase,
    MemberWord,
    Order,
    RankGroup,
    RankMember,
    Word,
    interface_of,
    obey,
    rank_environments,
)

SILENT_BEATS = 3


def group_of(node: str = "a", **ranks: int) -> RankGroup:
    members = tuple(RankMember(node=name, num_ranks=count) for name, count in (ranks or {"a": 1, "b": 2}).items())
    return RankGroup(node=node, address=f"10.0.0.{node}", members=members, master="10.0.0.a", port=29500)


class Launchers:
    """What the nodes say, and what the coordinator makes of it."""

    def __init__(self) -> None:
        self.sessions = 0
        self.now_s = 0.0
        self.beat = 0
        self.coordinator = Coordinator(group_of(), "c", silent_beats=SILENT_BEATS, new_session=self._new_session)
        self.words = {
            node: MemberWord(node=node, incarnation=f"{node}1", beat=0, phase=MemberPhase.IDLE) for node in "ab"
        }

    def _new_session(self) -> tuple[str, int]:
        self.sessions += 1
        return f"s{self.sessions}", 29500

    def say(self, node: str, phase: MemberPhase, **changes: str) -> LeaderWord:
        session = "" if phase is MemberPhase.IDLE else self.coordinator.word.session
        self.words[node] = msgspec.structs.replace(self.words[node], **{"phase": phase, "session": session, **changes})
        self.coordinator.hear(self.words[node])
        return self.coordinator.decide(self.now_s)

    def beats(self, count: int, *nodes: str) -> LeaderWord:
        for _ in range(count):
            self.beat += 1
            for node in nodes:
                self.coordinator.hear(msgspec.structs.replace(self.words[node], beat=self.beat))
        return self.coordinator.decide(self.now_s)

    def run(self) -> LeaderWord:
        self.now_s += 60.0
        for node in "ab":
            self.say(node, MemberPhase.IDLE)
        for node in "ab":
            word = self.say(node, MemberPhase.RUNNING)
        assert word.phase is GroupPhase.RUNNING
        return word


def test_a_session_begins_when_every_node_is_there() -> None:
    nodes = Launchers()
    assert nodes.say("a", MemberPhase.IDLE).phase is GroupPhase.GATHERING
    assert nodes.coordinator.missing() == ["node b"]
    word = nodes.say("b", MemberPhase.IDLE)
    assert (word.phase, word.session, word.port) == (GroupPhase.RUNNING, "s1", 29500)


def test_a_dead_rank_ends_the_session_with_its_reason_and_the_next_one_waits_until_all_ranks_are_gone() -> None:
    nodes = Launchers()
    nodes.run()
    word = nodes.say("b", MemberPhase.FAILED, reason="rank 2 ended: SIGKILL")
    assert (word.phase, word.reason) == (GroupPhase.GATHERING, "node b: rank 2 ended: SIGKILL")
    nodes.now_s += 60.0
    assert nodes.say("b", MemberPhase.IDLE).phase is GroupPhase.GATHERING
    assert nodes.coordinator.missing() == ["node a to end its former ranks"]
    assert nodes.say("a", MemberPhase.IDLE).session == "s2"
    assert nodes.coordinator.num_failed == 1


def test_what_other_nodes_know_of_the_same_failure_is_told_too() -> None:
    nodes = Launchers()
    nodes.run()
    session = nodes.coordinator.word.session
    nodes.say("a", MemberPhase.FAILED, reason="rank 0 lost rank 2")
    word = nodes.say("b", MemberPhase.FAILED, session=session, reason="rank 2 ended: SIGKILL")
    assert word.reason == "node a: rank 0 lost rank 2\nnode b: rank 2 ended: SIGKILL"
    assert nodes.say("b", MemberPhase.FAILED, session=session, reason="rank 2 ended: SIGKILL") == word
    assert nodes.coordinator.num_failed == 1


def test_sessions_that_fail_again_and_again_begin_later_and_later() -> None:
    nodes, waits_s = Launchers(), []
    for _ in range(8):
        nodes.run()
        nodes.say("b", MemberPhase.FAILED)
        began_s = nodes.now_s
        for node in "ab":
            nodes.say(node, MemberPhase.IDLE)
        while nodes.coordinator.decide(nodes.now_s).phase is GroupPhase.GATHERING:
            nodes.now_s += 0.1
        waits_s.append(nodes.now_s - began_s)
        nodes.say("b", MemberPhase.FAILED)
    assert waits_s == sorted(waits_s)
    assert waits_s[0] < 1.0
    assert 9.0 < waits_s[-1] < 11.0


def test_a_silent_node_is_given_up_when_words_get_through() -> None:
    nodes = Launchers()
    nodes.run()
    assert nodes.beats(SILENT_BEATS, "a").phase is GroupPhase.RUNNING
    word = nodes.beats(1, "a")
    assert (word.phase, word.reason) == (GroupPhase.GATHERING, "node b is silent: it died, or can't reach the broker")
    assert nodes.coordinator.num_failed == 0  # no rank is to blame
    nodes.now_s += 60.0
    assert nodes.say("a", MemberPhase.IDLE).phase is GroupPhase.GATHERING
    assert nodes.coordinator.missing() == ["node b"]


def test_a_broker_that_is_away_ends_no_session() -> None:
    nodes = Launchers()
    nodes.run()
    nodes.now_s += 3600.0  # nobody hears anybody, the coordinator not even its own node
    assert nodes.coordinator.decide(nodes.now_s).phase is GroupPhase.RUNNING
    assert nodes.beats(SILENT_BEATS, "a", "b").phase is GroupPhase.RUNNING


def test_a_launcher_that_was_started_anew_has_lost_its_ranks() -> None:
    nodes = Launchers()
    nodes.run()
    word = nodes.say("b", MemberPhase.IDLE, incarnation="b2")
    assert (word.phase, word.reason) == (GroupPhase.GATHERING, "node b was started anew: its former ranks are gone")


def test_when_a_node_leaves_all_end_after_their_step_before_the_others_gather() -> None:
    nodes = Launchers()
    nodes.run()
    word = nodes.say("b", MemberPhase.LEAVING)
    assert (word.phase, word.reason) == (GroupPhase.ENDING, "node b leaves")
    assert nodes.say("a", MemberPhase.IDLE).phase is GroupPhase.ENDING
    assert nodes.say("b", MemberPhase.LEFT).phase is GroupPhase.GATHERING
    assert nodes.coordinator.missing() == ["node b"]
    assert nodes.say("b", MemberPhase.IDLE, incarnation="b2").session == "s2"


def test_the_work_is_done_when_every_node_s_ranks_have_finished() -> None:
    nodes = Launchers()
    nodes.run()
    assert nodes.say("a", MemberPhase.FINISHED).phase is GroupPhase.RUNNING
    assert nodes.say("b", MemberPhase.FINISHED).phase is GroupPhase.FINISHED


def test_ranks_that_die_after_others_have_finished_bring_all_back() -> None:
    nodes = Launchers()
    nodes.run()
    nodes.say("a", MemberPhase.FINISHED)
    assert nodes.say("b", MemberPhase.FAILED, reason="x").phase is GroupPhase.GATHERING
    assert obey(nodes.coordinator.word, MemberPhase.FINISHED, "s1", silent=False) is Order.KILL


def word(phase: GroupPhase, session: str = "s2") -> LeaderWord:
    return LeaderWord(incarnation="c", phase=phase, session=session, port=1)


@pytest.mark.parametrize(
    ("said", "phase", "session", "silent", "order"),
    [
        (None, MemberPhase.IDLE, "", True, Order.NOTHING),
        (None, MemberPhase.RUNNING, "s1", False, Order.KILL),
        (word(GroupPhase.RUNNING), MemberPhase.IDLE, "", False, Order.START),
        (word(GroupPhase.RUNNING), MemberPhase.RUNNING, "s2", False, Order.NOTHING),
        (word(GroupPhase.RUNNING), MemberPhase.RUNNING, "s1", False, Order.KILL),
        (word(GroupPhase.RUNNING), MemberPhase.RUNNING, "s2", True, Order.KILL),
        (word(GroupPhase.RUNNING), MemberPhase.IDLE, "", True, Order.NOTHING),
        (word(GroupPhase.RUNNING), MemberPhase.FAILED, "s2", False, Order.NOTHING),
        (word(GroupPhase.GATHERING), MemberPhase.RUNNING, "s1", False, Order.KILL),
        (word(GroupPhase.GATHERING), MemberPhase.FAILED, "s1", False, Order.KILL),
        (word(GroupPhase.ENDING), MemberPhase.RUNNING, "s2", False, Order.STOP),
        (word(GroupPhase.FINISHED), MemberPhase.FINISHED, "s2", False, Order.LEAVE),
        (word(GroupPhase.FINISHED), MemberPhase.IDLE, "", False, Order.LEAVE),
    ],
)
def test_a_node_obeys_the_coordinator(said, phase: MemberPhase, session: str, *, silent: bool, order: Order) -> None:
    assert obey(said, phase, session, silent=silent) is order


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1))
def test_every_rank_is_on_one_node_and_finds_the_same_group(ranks: dict[str, int]) -> None:
    said, found = word(GroupPhase.RUNNING), []
    for node in ranks:
        found += rank_environments(group_of(node, **ranks), said, "")
    assert [int(one["RANK"]) for one in found] == list(range(sum(ranks.values())))
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HEADRACE_TRAINER_SESSION"):
        assert len({one[name] for one in found}) == 1
    first = next(iter(ranks))
    assert [one["LOCAL_RANK"] for one in rank_environments(group_of(first, **ranks), said, "")] == [
        str(local) for local in range(ranks[first])
    ]


def test_ranks_talk_over_the_interface_of_their_node_s_address() -> None:
    interfaces = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.2"], "ib0": ["192.168.1.2"]}
    assert interface_of(["192.168.1.2"], interfaces) == "ib0"
    assert interface_of(["127.0.0.3"], interfaces) == "lo"
    assert interface_of(["10.9.9.9"], interfaces) == ""
    assert interface_of([], interfaces) == ""
    (environment,) = rank_environments(group_of("a"), word(GroupPhase.RUNNING), "ib0")
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0")


@pytest.mark.parametrize(
    "said", [word(GroupPhase.RUNNING), MemberWord(node="b", incarnation="i", beat=1, phase=MemberPhase.FAILED)]
)
def test_words_are_told_apart_on_the_wire(said: Word) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Word) == said
