"""Checkpoints: written beside the training, whole or not at all, of the surviving line, for any number of ranks."""

from pathlib import Path

import msgspec
import pytest
import structlog.testing
from backend_case import Case, Recording, largest_difference, policy_folder, settings_of, train_case
from rank_processes import run_ranks
from training_case import plan, step_of

from stages.training import lineage
from stages.training.backends import ModelSettings, hf_backend
from stages.training.errors import CheckpointError
from stages.training.fsdp2_placement import Fsdp2Settings
from stages.training.placement import WholePlacement
from stages.training.ranks import single_rank

SPLIT = ModelSettings(fsdp2=Fsdp2Settings())


@pytest.fixture
def case(tmp_path):
    policy_folder(tmp_path)
    return Case(folder=str(tmp_path))


def trainer(case, **changes):
    ranks = single_rank()
    settings = msgspec.structs.replace(settings_of(case), **changes)
    return hf_backend(settings, case.models, plan(case.budget), ranks, Recording(WholePlacement(ranks)))


def train(backend, first, last, *, generation=1, checkpoint=True):
    digests = {}
    for number in range(first, last + 1):
        manifest, rows = step_of(number)
        digests[number] = backend.train(manifest, rows).digest
        if checkpoint:
            backend.save_checkpoint(number, generation)
    return digests


def names(case):
    return sorted(path.name for path in (Path(case.folder) / "checkpoints").glob("step-*"))


def test_what_is_written_in_the_background_is_the_state_of_its_step(case):
    first = trainer(case)
    digests = train(first, 1, 1)
    digests |= train(first, 2, 3, checkpoint=False)
    first.close()
    second = trainer(case)
    assert second.resume() == 1
    assert second.digest() == digests[1]
    assert train(second, 2, 3, checkpoint=False) == {n: digests[n] for n in (2, 3)}
    second.close()


def test_damaged_and_partial_checkpoints_are_named_and_the_one_before_is_used(case):
    first = trainer(case, keep_checkpoints=3)
    digests = train(first, 1, 3)
    first.close()
    root = Path(case.folder) / "checkpoints"
    damaged = next((root / "step-0000003-g1").glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    (root / "step-0000002-g1" / "checkpoint.json").write_text("{")
    (root / ".part-step-0000004-g1").mkdir()
    with structlog.testing.capture_logs() as lines:
        second = trainer(case)
        assert second.resume() == 1
    assert second.digest() == digests[1]
    assert {line["checkpoint"] for line in lines if "damaged" in line["event"]} == {
        "step-0000002-g1",
        "step-0000003-g1",
    }
    second.close()


def test_what_a_superseded_trainer_wrote_beyond_the_fork_is_passed_over_and_pruned(case):
    first = trainer(case, keep_checkpoints=4)
    train(first, 1, 1)
    first.close()
    second = trainer(case, keep_checkpoints=4)
    assert second.resume() == 1
    train(first := trainer(case, keep_checkpoints=4), 1, 3, generation=1)  # asleep, and done only afterwards
    first.close()
    train(second, 2, 2, generation=2)
    second.close()
    assert names(case) == ["step-0000001-g1", "step-0000002-g2"]
    found = lineage.newest_whole(Path(case.folder) / "checkpoints", second._settings_hash())
    assert (found.record.step, found.record.generation) == (2, 2)


def test_what_is_written_beyond_the_fork_counts_no_more_before_the_next_trainer_has_written_anything(case):
    first = trainer(case)
    train(first, 1, 2)
    first.close()
    second = trainer(case)
    assert second.resume(2) == 2
    late = trainer(case, keep_checkpoints=1)
    train(late, 1, 3)  # the first one, awake again
    late.close()
    root = Path(case.folder) / "checkpoints"
    assert [one.record.step for one in lineage.standing(root)] == [2]
    third = trainer(case)
    assert third.resume(3) == 2
    (root / "fork-g2.json").write_text("{")
    with structlog.testing.capture_logs() as lines:
        assert [one.record.step for one in lineage.standing(root)] == [2]
    assert [line["note"] for line in lines] == ["fork-g2.json"]
    for backend in (second, third):
        backend.close()


def test_the_newest_are_kept_and_every_so_many_for_good(case):
    backend = trainer(case, keep_every_steps=2)
    train(backend, 1, 5)
    backend.close()
    assert names(case) == ["step-0000002-g1", "step-0000004-g1", "step-0000005-g1"]
    assert backend.checkpoint_steps() == [4, 5]


def test_a_checkpoint_that_cannot_be_written_is_told_by_the_next_call(case):
    backend = trainer(case, checkpoint_dir=str(Path(case.folder) / "checkpoints"))
    root = Path(case.folder) / "checkpoints"
    train(backend, 1, 1)
    backend._writer.wait()
    target = root / "step-0000002-g1"
    target.write_text("a file where the folder should go")
    train(backend, 2, 2)
    with pytest.raises(CheckpointError, match="couldn't be written"):
        backend.close()


def test_ranks_of_any_number_go_on_from_each_others_checkpoints(tmp_path, case):
    straight = train_case(single_rank(), msgspec.structs.replace(case, last_step=3))
    case = msgspec.structs.replace(case, checkpoint_every=1)
    run_ranks(2, train_case, msgspec.structs.replace(case, models=SPLIT, last_step=1), store=tmp_path / "s")
    alone = train_case(single_rank(), msgspec.structs.replace(case, last_step=2))
    assert alone.resumed == 1
    split = msgspec.structs.replace(case, models=SPLIT, last_step=3)
    together = run_ranks(2, train_case, split, store=tmp_path / "s")
    assert [one.resumed for one in together] == [2, 2]
    assert largest_difference([*together[0].weights.values()], [*straight.weights.values()]) < 1e-6
