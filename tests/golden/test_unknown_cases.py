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
