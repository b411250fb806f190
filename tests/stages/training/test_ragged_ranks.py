"""Any rows over any ranks, over gloo: nothing hangs, and the gradient is that of one process; a lost rank ends the others."""

import json
import multiprocessing
from functools import partial

import pytest
import torch
from ragged_ranks import (
    end_ranks,
    lose_a_rank,
    lose_a_writer,
    save_with_rank_0s_lease,
    start_ranks,
    step_with_lengths,
    train_over,
)
from training_case import SPEC, backend

from stages.assembly.partition import PartitionSettings, _pack, partition_manifest
from stages.policy.tiny import make_policy_folder
from stages.training.ranks import single_rank


@pytest.fixture
def folder(tmp_path):
    make_policy_folder(tmp_path / "policy", SPEC)
    return tmp_path


def check_against_one_process(plan, num_loss_tokens, folder) -> None:
    everything = [row for rank in plan for micro in rank[0] for row in micro]
    assert sorted(everything) == list(range(len(num_loss_tokens)))
    assert len({len(rank[0]) for rank in plan}) == 1
    loss, norm, gradient = train_over(plan, num_loss_tokens, folder)
    alone_loss, alone_norm, alone = train_over([[[[row] for row in everything]]], num_loss_tokens, folder)
    assert float(alone.abs().max()) > 1e-3
    torch.testing.assert_close(gradient, alone, rtol=0, atol=1e-6)
    assert (loss, norm) == (pytest.approx(alone_loss, abs=1e-6), pytest.approx(alone_norm, abs=1e-6))


def test_five_rows_and_none(folder):
    check_against_one_process([[[[0, 1], [2, 3], [4]]], [[[], [], []]]], [9, 4, 17, 6, 3], folder)


def test_one_row_one_row_and_seven(folder):
    plan = [[[[0], [], []]], [[[], [1], []]], [[[2, 3, 4], [5, 6], [7, 8]]]]
    check_against_one_process(plan, [21, 3, 8, 5, 13, 2, 9, 30, 4], folder)


def test_nine_rows_over_four_ranks(folder):
    num_loss_tokens = [21, 3, 8, 5, 13, 2, 9, 30, 4]
    manifest, _ = step_with_lengths(1, num_loss_tokens)
    plan = partition_manifest(manifest, 4, PartitionSettings(max_tokens_per_microbatch=40)).ranks
    assert sorted((sum(map(len, rank[0])) for rank in plan), reverse=True) == [3, 2, 2, 2]
    check_against_one_process(plan, num_loss_tokens, folder)


def test_verl_6176_a_rank_that_could_end_sooner_makes_as_many_micro_batches(folder):
    num_loss_tokens = [60, 60, 60, 40, 40, 20]
    dealt, lengths = [[0, 1, 2], [3, 4, 5]], [size + 1 for size in num_loss_tokens]
    settings = PartitionSettings(max_tokens_per_microbatch=103)
    assert [len(bins) for bins in (_pack([rows], lengths, settings)[0] for rows in dealt)] == [3, 1]
    plan = [[micro_batches] for micro_batches in _pack(dealt, lengths, settings)]
    assert [len(rank[0]) for rank in plan] == [3, 3]
    check_against_one_process(plan, num_loss_tokens, folder)  # the mean over all 280 trained tokens


def test_a_checkpoint_has_every_rank_s_part_though_only_rank_0_holds_the_lease(folder):
    assert end_ranks(start_ranks(2, save_with_rank_0s_lease, folder), deadline_s=90.0) == [0, 0]
    (found,) = (folder / "checkpoints").iterdir()
    assert found.name == "step-0000001-g7"
    assert {path.name for path in found.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert backend(folder, single_rank()).resume() == 1


@pytest.mark.parametrize(("how", "timeout_s"), [("killed", 20.0), ("stopped", 2.0)])
def test_a_lost_rank_ends_the_others_with_a_named_error(how, timeout_s, folder):
    processes = start_ranks(3, partial(lose_a_rank, how, timeout_s), folder)
    codes = end_ranks([processes[0], processes[2]], deadline_s=60.0, lost=[processes[1]])
    assert codes == [1, 1]
    for rank in (0, 2):
        found = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
        assert found["error"] == "CollectiveError"
        assert found["seconds"] <= 30
        assert f"rank {rank} of 3: all_reduce of" in found["text"]
        assert f"timeout {timeout_s:g} s" in found["text"]
        assert "Look for the rank whose log ends first" in found["text"]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("how", "timeout_s"), [("killed", 20.0), ("stopped", 2.0)])
def test_a_lost_writer_of_a_checkpoint_ends_the_others_with_a_named_error_and_leaves_no_checkpoint(
    how, timeout_s, folder
):
    processes = start_ranks(2, partial(lose_a_writer, how, timeout_s), folder)
    assert end_ranks([processes[0]], deadline_s=60.0, lost=[processes[1]]) == [1]
    found = json.loads((folder / "rank-0.json").read_text(encoding="utf-8"))
    assert found["error"] == "CollectiveError"
    assert found["seconds"] <= 30
    assert "the writing of step-0000001-g1 failed" in found["text"]
    assert f"timeout {timeout_s:g} s, training.checkpoint_timeout_s" in found["text"]
    assert not list((folder / "checkpoints").glob("step-*"))
