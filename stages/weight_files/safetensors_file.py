"""Reads what a safetensors file says of itself, and checks files against a published manifest. No torch.

The format: 8 bytes little-endian length, a JSON header name → {dtype, shape, data_offsets}, then the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from schemas.messages.training import Tensor, WeightFile, WeightsManifest
from stages.ports import WeightsRefusedError

FILE_NAME: Final = "model.safetensors"
ADAPTER_FILE_NAME: Final = "adapter_model.safetensors"
"""Under which peft and the servers look for an adapter's tensors."""
_MAX_HEADER_BYTES: Final = 100 * 1024 * 1024
_CHUNK_BYTES: Final = 4 * 1024 * 1024


class Entry(msgspec.Struct, frozen=True):
    """What a header says of one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
    """Counted from where the data begins."""


def tensor_file(folder: str | Path) -> Path:
    """The file of a version's folder that holds its tensors: whole weights, or an adapter's where there is nothing else."""
    whole, adapter = Path(folder) / FILE_NAME, Path(folder) / ADAPTER_FILE_NAME
    return adapter if adapter.exists() and not whole.exists() else whole


def read_folder(folder: str | Path) -> WeightsManifest:
    """What lies in a version's folder: its tensors, and the checksums of the other files directly in it.

    Raises:
        WeightsRefusedError: the tensors' file is missing, truncated or no safetensors file, or a file can't be read.
    """
    path = tensor_file(folder)
    manifest = read_manifest(path)
    others: list[WeightFile] = []
    try:
        for other in sorted(Path(folder).iterdir()):
            if other.is_file() and other.name != path.name and not other.name.startswith("."):
                with other.open("rb") as file:
                    size_bytes = other.stat().st_size
                    others.append(WeightFile(other.name, size_bytes, _checksum(file, 0, size_bytes)))
    except OSError as error:
        raise WeightsRefusedError(f"{folder}: expected a folder of weights that can be read, found: {error}") from error
    return msgspec.structs.replace(manifest, file=path.name, files=others)


def read_manifest(path: Path) -> WeightsManifest:
    """Names, types, shapes, offsets and checksums of all tensors of a file, in order of name.

    Raises:
        WeightsRefusedError: the file is missing, truncated or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            return _manifest(path, file, path.stat().st_size)
    except OSError as error:
        raise WeightsRefusedError(f"{path}: expected a safetensors file, found: {error}") from error


def _manifest(path: Path, file: BufferedReader, size_bytes: int) -> WeightsManifest:
    start_of_data, entries = read_entries(path, file, size_bytes)
    tensors: list[Tensor] = []
    for name in sorted(entries):
        entry = entries[name]
        start, end = entry.data_offsets
        tensors.append(
            Tensor(
                name=name,
                dtype=entry.dtype,
                shape=entry.shape,
                offset=start,
                size_bytes=end - start,
                xxh3=_checksum(file, start_of_data + start, end - start),
            )
        )
    return WeightsManifest(tensors=tensors, total_bytes=size_bytes)


def read_entries(path: Path, file: BufferedReader, size_bytes: int) -> tuple[int, Mapping[str, Entry]]:
    """Where the data begins, and what the header says of each tensor; the data itself is not read.

    Raises:
        WeightsRefusedError: the file is truncated or no safetensors file.
    """
    if size_bytes < 8:
        raise WeightsRefusedError(f"{path}: truncated: {size_bytes} bytes, not even a header length")
    header_bytes = int.from_bytes(file.read(8), "little")
    start_of_data = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or start_of_data > size_bytes:
        raise WeightsRefusedError(
            f"{path}: truncated: the header takes {header_bytes} bytes, the file has {size_bytes}"
        )
    try:
        header = msgspec.json.decode(file.read(header_bytes), type=dict[str, object])
        header.pop("__metadata__", None)
        entries: Mapping[str, Entry] = msgspec.convert(header, dict[str, Entry])
    except msgspec.MsgspecError as error:
        raise WeightsRefusedError(f"{path}: its header can't be read: {error}") from error
    for name, entry in entries.items():
        start, end = entry.data_offsets
        if not 0 <= start <= end <= size_bytes - start_of_data:
            raise WeightsRefusedError(
                f"{path}: truncated: tensor {name} ends at {end}, the data at {size_bytes - start_of_data}"
            )
    return start_of_data, entries


def _checksum(file: BufferedReader, start: int, size_bytes: int) -> str:
    state = xxhash.xxh3_64()
    file.seek(start)
    buffer = memoryview(bytearray(min(size_bytes, _CHUNK_BYTES)))
    while size_bytes > 0:
        found = file.readinto(buffer[: min(size_bytes, _CHUNK_BYTES)])
        if not found:
            break
        state.update(buffer[:found])
        size_bytes -= found
    return state.hexdigest()


def weights_digest(manifest: WeightsManifest) -> str:
    """Equal for equal weights: xxh3 over names, types, shapes and checksums in order of name."""
    text = "\n".join(f"{t.name} {t.dtype} {t.shape} {t.xxh3}" for t in manifest.tensors)
    return xxhash.xxh3_64_hexdigest(text.encode())


def check_against(found: WeightsManifest, expected: WeightsManifest, where: str) -> None:
    """Compare a file with what was published.

    Raises:
        WeightsRefusedError: names the first tensor that is missing, unknown, of another shape or type, or damaged, or
            the first file that is.
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
    _check_files(found, expected, where)


def _check_files(found: WeightsManifest, expected: WeightsManifest, where: str) -> None:
    have = {file.name: file for file in found.files}
    for file in expected.files:
        other = have.get(file.name)
        if other is None:
            raise WeightsRefusedError(f"{where}: {file.name} was published with these weights and is missing")
        if other != file:
            raise WeightsRefusedError(
                f"{where}: {file.name}: expected {file.size_bytes} bytes with the checksum {file.xxh3}, found "
                f"{other.size_bytes} with {other.xxh3}; the copy is damaged"
            )
