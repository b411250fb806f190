"""The memory-to-memory port: who is which rank, how tensors are batched, and the trainer's broadcast over gloo."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import run_ranks
from torch import distributed as dist

from stages.training.errors import TrainingError
from stages.training.transfer import TensorMeta, TransferMember, batches, broadcast, meta_of, ranks_of


def test_servers_follow_the_trainer_with_all_their_ranks():
    first, world_size = ranks_of([TransferMember(name="a", num_ranks=2), TransferMember(name="b", num_ranks=4)])
    assert (first, world_size) == ({"a": 1, "b": 3}, 7)


@pytest.mark.parametrize("members", [[("a", 0)], [("a", 1), ("a", 1)]])
def test_servers_without_ranks_or_of_one_name_are_refused(members):
    with pytest.raises(TrainingError, match="name of its own and at least one rank"):
        ranks_of([TransferMember(name=name, num_ranks=ranks) for name, ranks in members])


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 40), max_size=12))
def test_every_tensor_travels_once_in_order_and_batches_stay_small(sizes):
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    found = list(batches(tensors, max_bytes=100))
    assert [name for batch in found for name in batch] == sorted(tensors)
    assert all(len(batch) == 1 or sum(4 * sizes[name] for name in batch) <= 100 for batch in found)


def test_a_tensor_is_announced_by_name_type_and_shape():
    assert meta_of("w", torch.zeros(2, 3, dtype=torch.bfloat16)) == TensorMeta(name="w", dtype="bfloat16", shape=[2, 3])


def _sent(ranks):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).t()}
    mine = tensors if ranks.rank == 0 else {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    if ranks.rank == 0:
        broadcast(mine, ["a", "b"], dist.group.WORLD, torch.device("cpu"))
    else:
        for name in ("a", "b"):
            dist.broadcast(mine[name], src=0)
    return {name: tensor.tolist() for name, tensor in mine.items()}


def test_tensors_reach_every_rank_of_the_group(tmp_path):
    found = run_ranks(3, _sent, store=tmp_path / "store")
    assert found[1] == found[2] == found[0] == {"a": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "b": [1.0, 1.0]}
