"""Seeded faults on a whole run: processes, broker, network, disk, clocks. See docs/durability.md."""

from __future__ import annotations

import pytest

from ops.chaos.plan import FaultKind
from ops.chaos.result import ChaosResult
from ops.chaos.run import ChaosSettings, run_chaos


def check(result: ChaosResult) -> None:
    assert result.details == []
    assert (result.unexplained, result.doubled, result.lost, result.refold_differs) == (0, 0, 0, 0)
    assert result.groups > 0
    assert result.answered_calls > 0
    assert sum(result.faults.values()) == result.num_faults


@pytest.mark.resources
@pytest.mark.timeout(600)
async def test_20_faults_of_every_kind_leave_nothing_unexplained_doubled_or_lost() -> None:
    result = await run_chaos(ChaosSettings(num_faults=20, seed=1))
    check(result)
    assert len(result.faults) >= 15


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [1, 3])
async def test_200_faults_leave_nothing_unexplained_doubled_or_lost(nodes: int) -> None:
    result = await run_chaos(ChaosSettings(num_faults=200, seed=200 + nodes, nodes=nodes))
    check(result)
    assert len(result.faults) >= 17


def _recovered(result: ChaosResult, kind: FaultKind) -> None:
    """Somebody's work was stored again within 5 s after the broker was back, every time."""
    check(result)
    assert result.faults == {kind.value: result.num_faults}
    assert result.recovery[kind.value].moving_s <= 5.0


@pytest.mark.resources
@pytest.mark.timeout(300)
async def test_a_broker_killed_twice_under_a_busy_run_is_taken_up_again_at_once() -> None:
    kind = FaultKind.BROKER_KILLED
    _recovered(await run_chaos(ChaosSettings(num_faults=2, seed=4, kinds=frozenset({kind}))), kind)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_a_broker_killed_10_times_in_a_row_under_a_busy_run_loses_nothing() -> None:
    kind = FaultKind.BROKER_KILLED
    _recovered(await run_chaos(ChaosSettings(num_faults=10, seed=4, kinds=frozenset({kind}))), kind)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_one_of_three_nodes_killed_10_times_under_a_busy_run_loses_nothing() -> None:
    kind = FaultKind.NODE_KILLED
    _recovered(await run_chaos(ChaosSettings(num_faults=10, seed=4, nodes=3, kinds=frozenset({kind}))), kind)


@pytest.mark.resources
@pytest.mark.timeout(300)
async def test_one_of_three_nodes_killed_twice_under_a_busy_run_loses_nothing() -> None:
    kind = FaultKind.NODE_KILLED
    _recovered(await run_chaos(ChaosSettings(num_faults=2, seed=4, nodes=3, kinds=frozenset({kind}))), kind)
