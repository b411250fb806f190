"""Which tensors a model folder holds, from the headers of its safetensors files: what a server can be given and what not.

A server loads a file without looking first; what doesn't fit leaves it half loaded or kills it. So the headers of new
weights are compared with those of the folder that the server was started with, before the server is told. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from stages.ports import WeightsRefusedError
from stages.weight_files.safetensors_file import read_entries

_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
_CONVERTIBLE: Final = frozenset(("F64", "F32", "F16", "BF16"))
"""Types that a server turns into the one it computes with."""


class TensorShape(msgspec.Struct, frozen=True):
    """One tensor."""

    dtype: str
    """As safetensors writes it: F32, BF16 …"""
    shape: tuple[int, ...]


def read_layout(folder: str | Path) -> dict[str, TensorShape]:
    """Names, types and shapes of all tensors in the safetensors files of a folder; their data is not read.

    Raises:
        WeightsRefusedError: There is no such file, or one is truncated, damaged, or contradicts itself or another.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise WeightsRefusedError(f"expected safetensors files in {folder}, found none")
    layout: dict[str, TensorShape] = {}
    for path in files:
        found = read_file_layout(path)
        for name in sorted(found.keys() & layout.keys()):
            raise WeightsRefusedError(f"{path}: tensor {name} stands in another file of the folder, too")
        layout |= found
    _check_index(Path(folder), layout)
    return layout


def read_file_layout(path: Path) -> dict[str, TensorShape]:
    """Names, types and shapes of the tensors in one safetensors file.

    Raises:
        WeightsRefusedError: It is missing, truncated, damaged, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            start_of_data, entries = read_entries(path, file, size_bytes)
    except OSError as error:
        raise WeightsRefusedError(f"{path}: expected a safetensors file, found: {error}") from error
    layout: dict[str, TensorShape] = {}
    end_of_data = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        bits = _BITS.get(entry.dtype)
        if bits is not None and math.prod(entry.shape) * bits != 8 * (end - start):
            raise WeightsRefusedError(
                f"{path}: tensor {name}: {entry.dtype}{entry.shape} does not take the {end - start} bytes it is given"
            )
        if start != end_of_data:
            raise WeightsRefusedError(
                f"{path}: tensor {name} begins at {start}, the one before it ends at {end_of_data}"
            )
        end_of_data = end
        layout[name] = TensorShape(entry.dtype, tuple(entry.shape))
    if start_of_data + end_of_data != size_bytes:
        raise WeightsRefusedError(
            f"{path}: expected {start_of_data + end_of_data} bytes by its header, found {size_bytes}"
        )
    return layout


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _check_index(folder: Path, layout: Mapping[str, TensorShape]) -> None:
    """A folder of several files lists in an index which tensors there are: a file that is missing shows there."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsRefusedError(f"{path} can't be read: {error}") from error
    for name in sorted(index.weight_map.keys() - layout.keys()):
        raise WeightsRefusedError(f"{folder}: tensor {name} is missing: its index wants it in {index.weight_map[name]}")


def check_layout(found: Mapping[str, TensorShape], expected: Mapping[str, TensorShape], where: str) -> None:
    """Compare new weights with what a server was started with. Floating-point types may differ, quantised ones not.

    Raises:
        WeightsRefusedError: Names the first tensor that is missing, unknown, or of another shape or type.
    """
    for name in sorted(expected.keys() - found.keys()):
        raise WeightsRefusedError(f"{where}: tensor {name} is missing")
    for name in sorted(found.keys() - expected.keys()):
        raise WeightsRefusedError(f"{where}: tensor {name} is not one of the model that is served")
    for name, want in sorted(expected.items()):
        have = found[name]
        if have.shape != want.shape:
            raise WeightsRefusedError(
                f"{where}: tensor {name}: expected the shape {list(want.shape)}, found {list(have.shape)}"
            )
        if have.dtype != want.dtype and not {have.dtype, want.dtype} <= _CONVERTIBLE:
            raise WeightsRefusedError(f"{where}: tensor {name}: expected the type {want.dtype}, found {have.dtype}")
