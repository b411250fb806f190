"""`headrace bench NAME`."""

from __future__ import annotations

import importlib
import sys
from typing import Literal, Protocol, cast

import msgspec
from rich.console import Console
from rich.table import Table

from ops.bench.result import BenchResult

BenchName = Literal[
    "stage",
    "assembly",
    "record",
    "gateway",
    "routing",
    "launch",
    "train",
    "tap",
    "weights",
    "async",
    "hop",
    "latency",
    "payload",
    "fold",
]


class _Bench(Protocol):
    def run(self) -> BenchResult: ...


def bench(name: BenchName, /, *, json: bool = False) -> None:
    """Measure one part of headrace beside a bare reference, in one run: machines are noisy, ratios hold.

    Examples:
        headrace bench stage --json

    Parameters
    ----------
    name
        What to measure.
    json
        One JSON object: name, metrics, reference, ratio, machine.
    """
    module_name = "asynchrony" if name == "async" else name  # `async` is a keyword
    module = cast(
        _Bench, importlib.import_module(f"ops.bench.{module_name}")
    )  # cast: each bench module has this one function
    result = module.run()
    if json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        return
    table = Table("figure", "headrace", "reference", "ratio", box=None)
    for key in sorted({*result.metrics, *result.reference, *result.ratio}):
        table.add_row(key, *(_number(column.get(key)) for column in (result.metrics, result.reference, result.ratio)))
    Console().print(table)


def _number(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,.3f}".rstrip("0").rstrip(".")
