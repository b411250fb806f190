"""Arrays as buffers: written as msgpack `bin`, read back as views without a copy.

Never a Python list of numbers and never pickle. An array travels as little-endian bytes beside its dtype; `as_numpy`
gives a read-only view of the very bytes that were received. Masks travel as bits, versions and turns run-length coded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import DecodeError

_TYPES: Final[dict[str, type[np.generic]]] = {
    "int32": np.int32,
    "int64": np.int64,
    "float32": np.float32,
    "float64": np.float64,
    "uint8": np.uint8,
}
DType = Literal["int32", "int64", "float32", "float64", "uint8"]

if sys.byteorder != "little":  # pragma: no cover - no such machine runs the supported engines
    raise ImportError("headrace writes little-endian arrays and supports little-endian machines only")


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A one-dimensional array. `len(data)` is the number of items times the dtype's size."""

    dtype: DType
    data: memoryview

    def as_numpy(self) -> npt.NDArray[np.generic]:
        """A read-only view, shape [n], of the bytes that were received: no copy.

        Raises:
            DecodeError: the number of bytes is no multiple of the item's size.
        """
        dtype = np.dtype(_TYPES[self.dtype])
        if self.data.nbytes % dtype.itemsize:
            raise DecodeError(
                f"expected a multiple of {dtype.itemsize} bytes of {self.dtype}, found {self.data.nbytes}"
            )
        view = np.frombuffer(self.data, dtype=dtype)
        view.flags.writeable = False
        return view

    @property
    def length(self) -> int:
        """Number of items."""
        return self.data.nbytes // np.dtype(_TYPES[self.dtype]).itemsize


def _pack(values: npt.ArrayLike, dtype: DType) -> Array:
    array = np.ascontiguousarray(values, dtype=_TYPES[dtype])
    return Array(dtype=dtype, data=array.data.cast("B") if array.size else memoryview(b""))


def int32(values: npt.ArrayLike) -> Array:
    """Token ids, versions, counts: [n] int32."""
    return _pack(values, "int32")


def int64(values: npt.ArrayLike) -> Array:
    """Sizes and offsets: [n] int64."""
    return _pack(values, "int64")


def float32(values: npt.ArrayLike) -> Array:
    """Log-probs: [n] float32."""
    return _pack(values, "float32")


def float64(values: npt.ArrayLike) -> Array:
    """Advantages and loss weights: [n] float64."""
    return _pack(values, "float64")


class Bits(msgspec.Struct, frozen=True, array_like=True):
    """A mask of `length` bits, eight to a byte, first item in the highest bit."""

    length: int
    data: memoryview

    def as_numpy(self) -> npt.NDArray[np.bool_]:
        """The mask, shape [length] bool (a new array: bits are unpacked)."""
        if self.data.nbytes != (self.length + 7) // 8:
            raise DecodeError(
                f"expected {(self.length + 7) // 8} bytes for {self.length} bits, found {self.data.nbytes}"
            )
        return np.unpackbits(np.frombuffer(self.data, dtype=np.uint8), count=self.length).astype(np.bool_)


def bits(mask: npt.ArrayLike) -> Bits:
    """A boolean mask [n] as bits."""
    flags = np.ascontiguousarray(mask, dtype=np.bool_)
    packed = np.packbits(flags)
    return Bits(length=int(flags.size), data=packed.data.cast("B") if packed.size else memoryview(b""))


class Runs(msgspec.Struct, frozen=True, array_like=True):
    """Run-length coded int32 values: `values[i]` repeated `lengths[i]` times."""

    values: Array
    lengths: Array

    def as_numpy(self) -> npt.NDArray[np.int32]:
        """The expanded values, shape [sum(lengths)] int32."""
        return np.repeat(self.values.as_numpy().astype(np.int32), self.lengths.as_numpy().astype(np.int64))

    @property
    def total(self) -> int:
        """Number of items when expanded."""
        return int(self.lengths.as_numpy().astype(np.int64).sum())


def runs_of(pairs: Sequence[tuple[int, int]]) -> Runs:
    """(value, length) pairs as they are, lengths > 0, neighbours with different values."""
    return Runs(values=int32([value for value, _ in pairs]), lengths=int32([length for _, length in pairs]))


def runs(values: npt.ArrayLike) -> Runs:
    """Values [n] int32, run-length coded."""
    array = np.ascontiguousarray(values, dtype=np.int32)
    if array.size == 0:
        return Runs(values=int32([]), lengths=int32([]))
    starts = np.flatnonzero(np.concatenate(([True], array[1:] != array[:-1])))
    lengths = np.diff(np.append(starts, array.size))
    return Runs(values=int32(array[starts]), lengths=int32(lengths))
