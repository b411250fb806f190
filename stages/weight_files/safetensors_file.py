"""Reads what a safetensors file says of itself, and checks files against a published manifest. No torch.

The format: 8 bytes little-endian length, a JSON header name → {dtype, shape, data_offsets}, then the data.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from schemas.messages.training import Tensor, WeightsManifest
from stages.ports import WeightsRefusedError

FILE_NAME: Final = "model.safetensors"
_MAX_HEADER_BYTES: Final = 100 * 1024 * 1024


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_manifest(path: Path) -> WeightsManifest:
    """Names, types, shapes, offsets and checksums of all tensors of a file, in order of name.

    Raises:
        WeightsRefusedError: the file is missing, truncated or no safetensors file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _manifest(path, memoryview(view))
    except (OSError, ValueError) as error:
        raise WeightsRefusedError(f"{path}: expected a safetensors file, found: {error}") from error


def _manifest(path: Path, view: memoryview) -> WeightsManifest:
    try:
        if len(view) < 8:
            raise WeightsRefusedError(f"{path}: truncated: {len(view)} bytes, not even a header length")
        header_bytes = int.from_bytes(view[:8], "little")
        if header_bytes > _MAX_HEADER_BYTES or 8 + header_bytes > len(view):
            raise WeightsRefusedError(
                f"{path}: truncated: the header takes {header_bytes} bytes, the file has {len(view)}"
            )
        try:
            header: dict[str, object] = msgspec.json.decode(view[8 : 8 + header_bytes], type=dict[str, object])
            header.pop("__metadata__", None)
            entries: Mapping[str, _Entry] = msgspec.convert(header, dict[str, _Entry])
        except msgspec.MsgspecError as error:
            raise WeightsRefusedError(f"{path}: its header can't be read: {error}") from error
        data = view[8 + header_bytes :]
        tensors: list[Tensor] = []
        for name in sorted(entries):
            entry = entries[name]
            start, end = entry.data_offsets
            if not 0 <= start <= end <= len(data):
                raise WeightsRefusedError(f"{path}: truncated: tensor {name} ends at {end}, the data at {len(data)}")
            tensors.append(
                Tensor(
                    name=name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    offset=start,
                    size_bytes=end - start,
                    xxh3=xxhash.xxh3_64_hexdigest(data[start:end]),
                )
            )
        return WeightsManifest(tensors=tensors, total_bytes=len(view))
    finally:
        view.release()


def weights_digest(manifest: WeightsManifest) -> str:
    """Equal for equal weights: xxh3 over names, types, shapes and checksums in order of name."""
    text = "\n".join(f"{t.name} {t.dtype} {t.shape} {t.xxh3}" for t in manifest.tensors)
    return xxhash.xxh3_64_hexdigest(text.encode())


def check_against(found: WeightsManifest, expected: WeightsManifest, where: str) -> None:
    """Compare a file with what was published.

    Raises:
        WeightsRefusedError: names the first tensor that is missing, unknown, of another shape or type, or damaged.
    """
    have = {tensor.name: tensor for tensor in found.tensors}
    want = {tensor.name: tensor for tensor in expected.tensors}
    for name in sorted(want.keys() - have.keys()):
        raise WeightsRefusedError(f"{where}: tensor {name} is missing")
    for name in sorted(have.keys() - want.keys()):
        raise WeightsRefusedError(f"{where}: tensor {name} was not published")
    for name, tensor in sorted(want.items()):
        other = have[name]
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            raise WeightsRefusedError(
                f"{where}: tensor {name}: expected {tensor.dtype}{tensor.shape}, found {other.dtype}{other.shape}"
            )
        if other.xxh3 != tensor.xxh3:
            raise WeightsRefusedError(
                f"{where}: tensor {name}: expected the checksum {tensor.xxh3}, found {other.xxh3}; the copy is damaged"
            )
