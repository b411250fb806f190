from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.plan import JOINING, PROCESSES, FaultKind, parse_kinds, plan
from schemas.errors import ConfigError


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_seed_says_every_fault_with_its_target_and_duration(seed: int, num_faults: int) -> None:
    first = plan(seed, num_faults, kinds=frozenset(FaultKind))
    assert first == plan(seed, num_faults, kinds=frozenset(FaultKind))
    assert [fault.number for fault in first] == list(range(num_faults))


def test_other_seeds_give_other_faults() -> None:
    assert plan(1, 30, kinds=frozenset(FaultKind)) != plan(2, 30, kinds=frozenset(FaultKind))


@given(st.integers(0, 2**32))
def test_few_faults_already_are_of_every_kind(seed: int) -> None:
    kinds = frozenset(FaultKind)
    assert {fault.kind for fault in plan(seed, len(kinds), kinds=kinds)} == kinds


@given(st.integers(0, 2**32))
def test_a_deck_strikes_every_process_in_every_way(seed: int) -> None:
    struck = [FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART]
    deck = plan(seed, 3 * len(PROCESSES) + len(JOINING), kinds={*struck, FaultKind.SECOND_WORKER})
    assert len({fault.name for fault in deck}) == len(deck)
    for kind in struck:
        assert {fault.target for fault in deck if fault.kind is kind} == set(PROCESSES)


def test_faults_can_be_kept_to_some_kinds() -> None:
    only = parse_kinds(["node_killed"])
    assert {fault.kind for fault in plan(3, 10, kinds=only)} == {FaultKind.NODE_KILLED}
    assert parse_kinds([]) == frozenset(FaultKind)


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--only fire: expected one of acks_lost, "):
        parse_kinds(["fire"])
