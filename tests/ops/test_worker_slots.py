"""Names of launch workers: no two living ones share one, and a dead one's is taken up again."""

import subprocess
import sys

from ops.workers.slots import claim_slot, hold_if_dead, leave_mark, left_marks


def test_two_living_workers_have_different_names(tmp_path) -> None:
    with claim_slot(tmp_path, "launch", host="h") as first, claim_slot(tmp_path, "launch", host="h") as second:
        assert (first.name, second.name) == ("launch.h.0", "launch.h.1")
        assert second.dead == ()


def test_the_first_to_end_frees_its_own_name_alone(tmp_path) -> None:
    with claim_slot(tmp_path, "launch", host="h") as first:
        with claim_slot(tmp_path, "launch", host="h"):
            pass
        with claim_slot(tmp_path, "launch", host="h") as third:
            assert (first.name, third.name) == ("launch.h.0", "launch.h.1")


def test_a_killed_workers_name_is_free_and_told_to_the_next(tmp_path) -> None:
    code = (
        "import sys, time, pathlib; from ops.workers.slots import claim_slot\n"
        "with claim_slot(pathlib.Path(sys.argv[1]), 'launch', host='other'): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        with claim_slot(tmp_path, "launch", host="h") as slot:
            assert slot.dead == ()
        worker.kill()
        worker.wait()
    with claim_slot(tmp_path, "launch", host="h") as slot:
        assert (slot.name, slot.dead) == ("launch.h.0", ("launch.other.0",))
    with claim_slot(tmp_path, "launch", host="other") as slot:
        assert slot.name == "launch.other.0"


def test_the_mark_of_a_killed_process_is_found_and_those_of_living_ones_are_not(tmp_path) -> None:
    with leave_mark(tmp_path, "preflight") as first, leave_mark(tmp_path, "preflight") as second:
        assert first.part != second.part
        assert left_marks(tmp_path, "preflight") == []
    assert {mark.part for mark in left_marks(tmp_path, "preflight")} == {first.part, second.part}
    first.forget()
    (left,) = left_marks(tmp_path, "preflight")
    assert left == second


def test_a_dead_workers_name_is_taken_up_by_nobody_while_it_is_held(tmp_path) -> None:
    with claim_slot(tmp_path, "launch", host="h") as first, hold_if_dead(tmp_path, first.name) as is_dead:
        assert not is_dead
    with hold_if_dead(tmp_path, "launch.h.0") as is_dead, claim_slot(tmp_path, "launch", host="h") as second:
        assert (is_dead, second.name) == (True, "launch.h.1")
    with claim_slot(tmp_path, "launch", host="h") as third:
        assert third.name == "launch.h.0"
