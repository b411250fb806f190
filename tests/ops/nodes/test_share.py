from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.config import decode_config
from ops.nodes.file import NodeSection
from ops.nodes.share import check_scale, refuse_unscalable, scaled, share_of, spread, whole, workers
from ops.wiring import LIGHT_STAGES
from schemas.errors import ConfigError

STREAMS = [{"name": "reverse", "stream_id": "reverse"}]
VLLM = {"kind": "vllm", "count": 2, "urls": ["http://h:9"]}


def config(**sections):
    return decode_config({"streams": STREAMS, "arena": {"url": "local"}, **sections})


def names(share, config_) -> list[tuple[str, tuple[str, ...]]]:
    return [(worker.name, worker.stages) for worker in workers(share, config_)]


def test_a_run_on_one_machine_is_one_node_that_runs_everything() -> None:
    share = whole(config())
    assert share.control
    assert share.trainer
    assert share.arena
    assert names(share, config()) == [("gateway", ("gateway",)), ("stages", LIGHT_STAGES)]


def test_apart_every_light_stage_has_a_process() -> None:
    apart = config(run={"stage_processes": "apart"})
    found = names(whole(apart), apart)
    assert {stages for _, stages in found} == {("gateway",), *((stage,) for stage in LIGHT_STAGES)}


def test_nodes_of_a_topology_share_the_stages_out() -> None:
    head = share_of(NodeSection(name="head", address="a", control=True, fan_out=1), config())
    gpu = share_of(NodeSection(name="gpu", address="b", trainer=True), config())
    rollout = share_of(NodeSection(name="r", address="c", gateways=2, launchers=2), config())
    assert names(head, config()) == [("stages", ("sampling", "assembly", "retention")), ("fan_out", ("fan_out",))]
    assert names(gpu, config()) == [("stages", ("weights",))]  # it reads the trainer's files
    assert [name for name, _ in names(rollout, config())] == ["gateway", "gateway-2", "arena_launch", "arena_launch-2"]
    assert (head.trainer, gpu.trainer, rollout.trainer) == (False, True, False)


def test_engines_are_named_by_their_node_and_running_servers_are_looked_after_once() -> None:
    servers = config(engine=VLLM)
    head = share_of(NodeSection(name="head", address="a", control=True, engines=2), servers)
    assert [plan.name for plan in head.engines] == ["head-engine-0", "head-engine-1", "h-9"]
    assert [plan.name for plan in share_of(NodeSection(name="g", address="b", engines=2), servers).engines] == [
        "g-engine-0",
        "g-engine-1",
    ]


@pytest.mark.parametrize("stage", ["sampling", "assembly", "trainer", "weights", "retention", "engine"])
def test_what_can_t_be_scaled_says_why(stage: str) -> None:
    with pytest.raises(ConfigError, match=f"{stage} can't be scaled: "):
        refuse_unscalable(stage)


def test_an_unknown_stage_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match="nothing: expected one of fan_out, arena_launch, rewards, gateway"):
        refuse_unscalable("nothing")


def test_the_first_process_of_a_stage_that_shares_one_with_the_folds_stays() -> None:
    share = whole(config())
    assert [worker.name for worker in scaled(share, "rewards", 3)] == ["rewards-2", "rewards-3"]
    with pytest.raises(ConfigError, match=r"rewards=0: expected 1 to 256 \(the first one shares a process"):
        check_scale(share, "rewards", 0)
    check_scale(share, "gateway", 0)


@given(st.integers(0, 500), st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1))
def test_processes_are_shared_out_evenly_and_none_is_lost(total: int, nodes: dict[str, int]) -> None:
    found = spread(total, nodes)
    assert sum(found.values()) == total
    assert found.keys() == nodes.keys()
    assert max(found.values()) - min(found.values()) <= 1
