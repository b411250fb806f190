"""docs/losses.md is complete, and its example runs."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import torch

from stages.learning.losses.batch import Tokens
from stages.learning.losses.config import LossConfig
from stages.learning.losses.methods import Method
from stages.learning.rows import Rows

DOC = (Path(__file__).parents[4] / "docs" / "losses.md").read_text()
FILE, TEST = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)


def make_tokens(logp_T, advantages_T):
    everything = torch.ones(len(logp_T), dtype=torch.bool)
    return Tokens(
        logp_T=logp_T,
        anchor_logp_T=logp_T.detach(),
        advantages_T=advantages_T,
        mask_T=everything,
        keep_T=everything,
        weight_T=torch.ones(len(logp_T)),
        rows=Rows(row_T=torch.zeros(len(logp_T), dtype=torch.int64), num_rows=1),
        log_ratio_clamp=None,
        selected_T=None,
    )


def test_the_documented_example_runs_with_its_own_test():
    names = {"__name__": "documented_example", "make_tokens": make_tokens}
    exec(compile(FILE, "docs/losses.md", "exec"), names)  # noqa: S102 - the document's code is the subject
    exec(compile(TEST, "docs/losses.md", "exec"), names)  # noqa: S102 - same
    names["test_better_tokens_are_pulled_harder"]()


def test_the_documented_example_is_a_file_of_30_lines_at_the_most():
    assert len(FILE.strip().splitlines()) <= 30


def test_every_method_and_each_of_its_settings_is_in_the_table():
    for method in get_args(Method):
        kind = method.__struct_config__.tag
        row = next(line for line in DOC.splitlines() if line.startswith(f"| `{kind}` |"))
        for field in msgspec.structs.fields(method):
            assert f"`{field.name}`" in row, (kind, field.name)


def test_every_setting_of_the_loss_is_described():
    for field in msgspec.structs.fields(LossConfig):
        assert f"| `{field.name}` |" in DOC or field.name == "method", field.name
