"""A golden case and what checks need to judge it; knows nothing of losses, packing or any room.

A case is one object of a data file (format: `data/README.md`). Its `params`, `inputs` and `expected` are `Fields`: mappings
that remember what was read, so that a check which overlooks a key of a file that it has never seen fails instead of passing.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

# (rtol, atol) of data/README.md, per precision that the reference ran in and per quantity.
_TOLERANCES = {
    "float32": {
        "loss": (2e-5, 2e-6),
        "gradient": (1e-4, 1e-6),
        "token": (5e-5, 5e-6),
        "normalised": (2e-4, 2e-5),
        "metric": (5e-5, 5e-6),
    },
    "float64": {
        "loss": (1e-7, 1e-9),
        "gradient": (1e-7, 1e-9),
        "token": (1e-7, 1e-9),
        "normalised": (1e-7, 1e-9),
        "metric": (1e-6, 1e-6),
    },
}


class Fields(Mapping[str, object]):
    """A JSON object that remembers which keys were read. Reading a whole value (list or scalar) marks its key; a nested
    object is marked when it is taken and watches its own keys. `None` means "not given" and needs no reading.
    """

    def __init__(self, values: Mapping[str, object], path: str) -> None:
        self._path = path
        self._values = {
            key: Fields(value, f"{path}.{key}") if isinstance(value, Mapping) else value
            for key, value in values.items()
        }
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self._read.add(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Fields({self._path}: {self._values!r})"

    def without_effect(self, *keys: str) -> None:
        """Mark keys that a check understands and that change nothing here. Say why at the call."""
        for key in keys:
            if key in self._values:
                self._read.add(key)
                value = self._values[key]
                if isinstance(value, Fields):
                    value.without_effect(*value)

    def unread(self) -> list[str]:
        """Paths of the given keys that nobody read."""
        found: list[str] = []
        for key, value in self._values.items():
            if value is None:
                continue
            if key not in self._read:
                found.append(f"{self._path}.{key}")
            elif isinstance(value, Fields):
                found += value.unread()
        return found


@dataclass(frozen=True, kw_only=True)
class Case:
    file: str
    """Stem of the data file: the first half of the dispatch."""
    name: str
    """For messages only; a check never decides by it."""
    kind: str
    """The second half of the dispatch."""
    source: str
    dtype: str
    """Precision that the reference ran in: float32, float64 or mixed."""
    inputs: Fields
    params: Fields
    expected: Fields
    note: str
    defect: bool
    """The reference misbehaves: assert what `note` calls sane, not `expected`."""

    def unread(self) -> list[str]:
        """Keys that the check overlooked; a defect's expected values are not for comparison."""
        judged = [self.params, self.inputs] if self.defect else [self.params, self.inputs, self.expected]
        return [path for fields in judged for path in fields.unread()]


def load_cases(folder: Path) -> list[Case]:
    """All cases of a folder of data files, in the order of file name and position.

    Raises:
        FileNotFoundError: the folder holds no data file: nothing would be tested.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no *.json golden data in {folder}; give --golden-dir a folder that holds some")
    return [_case(file.stem, raw) for file in files for raw in json.loads(file.read_text())]


def _case(stem: str, raw: Mapping[str, object]) -> Case:
    def fields(key: str) -> Fields:
        value = raw.get(key) or {}
        assert isinstance(value, Mapping), (
            f"{stem}/{raw.get('name')}: {key} is {type(value).__name__}, expected an object"
        )
        return Fields(value, key)

    return Case(
        file=stem,
        name=str(raw["name"]),
        kind=str(raw["kind"]),
        source=str(raw.get("source", "")),
        dtype=str(raw.get("dtype", "float64")),
        inputs=fields("inputs"),
        params=fields("params"),
        expected=fields("expected"),
        note=str(raw.get("note") or ""),
        defect=bool(raw.get("defect")),
    )


def numbers(value: object) -> object:
    """A JSON value with its "nan", "inf" and "-inf" strings made floats."""
    if isinstance(value, str):
        return _NONFINITE[value]
    if isinstance(value, (list, tuple)):
        return [numbers(one) for one in value]
    return value


def array(value: object) -> NDArray[np.float64]:
    """A JSON list (or scalar) of numbers as a float64 array."""
    return np.asarray(numbers(value), dtype=np.float64)


def tolerance(dtype: str, quantity: str) -> tuple[float, float]:
    """(rtol, atol) for a quantity: loss, gradient, token, normalised, metric. "mixed" is judged as float32."""
    return _TOLERANCES["float64" if dtype == "float64" else "float32"][quantity]


def assert_close(
    actual: ArrayLike, expected: object, case: Case, quantity: str, what: str, *, where: ArrayLike | None = None
) -> None:
    """Compare with the README's tolerance, NaN equal to NaN; `where` limits the comparison to positions of a mask."""
    rtol, atol = tolerance(case.dtype, quantity)
    got, want = np.asarray(actual, dtype=np.float64), array(expected)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if where is not None:
        keep = np.asarray(where).astype(bool)
        got, want = got[keep], want[keep]
    np.testing.assert_allclose(
        got, want, rtol=rtol, atol=atol, equal_nan=True, err_msg=f"{case.file}/{case.name}: {what}"
    )
