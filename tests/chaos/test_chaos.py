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


async def _again_and_again(kind: FaultKind, num_faults: int, *, nodes: int = 1) -> ChaosResult:
    result = await run_chaos(ChaosSettings(num_faults=num_faults, seed=4, nodes=nodes, kinds=frozenset({kind})))
    check(result)
    assert result.faults == {kind.value: num_faults}
    return result


@pytest.mark.resources
@pytest.mark.timeout(300)
async def test_a_broker_killed_twice_under_a_busy_run_loses_nothing() -> None:
    await _again_and_again(FaultKind.BROKER_KILLED, 2)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_work_goes_on_within_5_s_after_each_of_10_kills_of_the_broker_in_a_row() -> None:
    result = await _again_and_again(FaultKind.BROKER_KILLED, 10)
    assert result.recovery[FaultKind.BROKER_KILLED].moving_s <= 5.0


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_work_goes_on_within_5_s_after_each_of_10_kills_of_one_of_three_nodes() -> None:
    result = await _again_and_again(FaultKind.NODE_KILLED, 10, nodes=3)
    assert result.recovery[FaultKind.NODE_KILLED].moving_s <= 5.0


@pytest.mark.resources
@pytest.mark.timeout(300)
async def test_one_of_three_nodes_killed_twice_under_a_busy_run_loses_nothing() -> None:
    await _again_and_again(FaultKind.NODE_KILLED, 2, nodes=3)


@pytest.mark.resources
@pytest.mark.timeout(600)
async def test_rabbitmq_and_its_workers_may_die_too() -> None:
    result = await run_chaos(ChaosSettings(num_faults=6, seed=3, broker="rabbitmq"))
    check(result)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_50_faults_on_rabbitmq_leave_nothing_unexplained_doubled_or_lost() -> None:
    result = await run_chaos(ChaosSettings(num_faults=50, seed=5, broker="rabbitmq"))
    check(result)
    assert result.faults["broker_killed"] >= 1
