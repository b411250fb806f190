"""A trainer whose ranks are on two nodes: loopback addresses of one machine, gloo, parameters split over both (FSDP2)."""

from __future__ import annotations

import signal

import anyio
import pytest
from topologies import ROLLS_OUT, head, node_table, topology
from waiting import wait_until

from pipeline.log import RunLog
from schemas.topics import STEP_TRAINED

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(420)]

TWO_RANKS = (
    *('training.backend="fsdp2"', "training.ranks=2", 'training.checkpoint_dir="{folder}/checkpoints"'),
    *("training.node_silent_s=6.0", "policy.hidden_size=32", "policy.num_layers=2", "policy.num_heads=2"),
    "policy.warmup_max_updates=1",
)
TRAINER = "\n[trainer]\nport = 0\n"
GPU_1, GPU_2 = (node_table(f"gpu-{number}", f"127.0.0.{number + 2}", "trainer = true") for number in (1, 2))


async def until_said(run, words: str) -> None:
    """Until the leading node's launcher logs these words."""
    log = run.folder / run.run / "gpu-1" / "logs" / "trainer.log"
    await wait_until(lambda: log.exists() and words in log.read_text(), words, deadline_s=200, every_s=0.1)


async def test_ranks_of_two_nodes_go_on_together_after_a_rank_a_node_and_the_leading_node_died(
    nodes, wait_until, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    settings = (*TWO_RANKS, "training.checkpoint_every_steps=3")
    tables = (TRAINER, head(*ROLLS_OUT, trainer=False), GPU_1, GPU_2)
    run = nodes("split", 16, topology(*tables, settings=settings))
    await run.up("head")
    with anyio.fail_after(400):
        await run.until_keys()
        await run.up("gpu-1")
        await run.up("gpu-2")
        await run.until_ready("head", "gpu-1", "gpu-2")
        await run.until_step(2)

        (other,) = run.workers("gpu-1", "worker trainer")
        (rank,) = run.workers("gpu-2", "worker trainer")
        rank.send_signal(signal.SIGKILL)
        await wait_until(lambda: not other.is_running())
        await until_said(run, "node gpu-2: rank 1 ended (SIGKILL)")
        await run.until_step(5)

        run.kill("gpu-2")

        async def waits_for_the_node() -> bool:
            return "node gpu-2, to begin with all 2 ranks" in await run.headrace("status", str(run.file), "--json")

        await wait_until(waits_for_the_node, deadline_s=90.0)
        assert not run.workers("gpu-1", "worker trainer")
        await run.up("gpu-2")
        await run.until_step(8)

        run.kill("gpu-1")
        await wait_until(lambda: not run.workers("gpu-2", "worker trainer"))
        await run.up("gpu-1")
        await run.until_step(13)
        async with run.broker() as broker, RunLog(broker).read([STEP_TRAINED], follow=False) as entries:
            trained = [entry.message async for entry in entries]
        result = await run.result()
        for node in ("gpu-1", "gpu-2"):
            assert await run.processes[node].wait() == 0, run.said(node)

    assert (result["steps"], result["unexplained"], result["doubled"], result["dead_letters"]) == (16, 0, 0, 0)
    assert {one.world_size for one in trained} == {2}
    assert len({one.generation for one in trained}) >= 4  # each fault was followed by another group
    by_step: dict[int, set[str]] = {}
    for one in trained:
        by_step.setdefault(one.step, set()).add(one.digest)
    assert len(trained) > len(by_step)  # some were computed again, by another group
    assert {len(digests) for digests in by_step.values()} == {1}  # and came to the same bits


async def test_the_node_that_controls_and_leads_dies_with_the_broker_and_the_other_has_waited(
    nodes, wait_until, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    settings = (*TWO_RANKS, "training.checkpoint_every_steps=1")
    run = nodes("lead", 7, topology(TRAINER, head(*ROLLS_OUT), GPU_1, settings=settings))
    with anyio.fail_after(400):
        await run.up("head")
        await run.until_keys()
        await run.up("gpu-1")
        await run.until_ready("head", "gpu-1")
        await run.until_step(2)
        (rank,) = run.workers("gpu-1", "worker trainer")

        run.kill("head")
        await run.processes["head"].wait()
        await run.up("head")
        await run.until_ready("head")
        await wait_until(lambda: not rank.is_running(), deadline_s=90.0)
        result = await run.result()
        assert await run.processes["gpu-1"].wait() == 0, run.said("gpu-1")
    assert (result["steps"], result["unexplained"], result["doubled"], result["dead_letters"]) == (7, 0, 0, 0)
