"""What no check knows fails: a new file, a new kind, an empty folder."""

import json

import pytest
from golden_case import load_cases
from test_golden import _check_for

CASE = {"name": "x", "kind": "never_seen", "inputs": {}, "params": {}, "expected": {}}


@pytest.mark.parametrize("file", ["partition", "advantages", "loss_aggregation", "never_seen"])
def test_an_unknown_kind_of_case_fails(tmp_path, file):
    (tmp_path / f"{file}.json").write_text(json.dumps([CASE]), encoding="utf-8")
    (case,) = load_cases(tmp_path)
    with pytest.raises(AssertionError, match="no check"):
        _check_for(case)


def test_a_folder_without_cases_fails(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*\.json golden data"):
        load_cases(tmp_path)


def test_an_unnamed_kind_of_a_reference_goes_to_the_check_of_its_losses(tmp_path):
    cases = [CASE | {"name": kind, "kind": kind} for kind in ("slime_gspo", "trl_sapo")]
    (tmp_path / "policy_losses.json").write_text(json.dumps(cases), encoding="utf-8")
    assert [_check_for(case).__name__ for case in load_cases(tmp_path)] == ["check_slime", "check_trl"]
