"""Which files of a folder are the rows of one split: a saved `datasets` folder, a hub's layout, or files of a kind known here.

    folder ──▶ saved Dataset (state.json)          its files
               saved DatasetDict                   the folder of the split
               train-*.parquet, test.jsonl, …      the files that are named after the split; without any such name all files

It must not know what a row is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from schemas.errors import ConfigError

DEFAULT_SPLIT: Final = "train"

_KNOWN: Final = frozenset({".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"})
_NO_ROWS: Final = frozenset({"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"})
_SHARD: Final = re.compile(r"(.+?)-\d{5}-of-\d{5}(-.*)?")
_SPLITS: Final = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
"""How a split is called in names of files and folders, as the hub reads them."""


T = TypeVar("T")


class _DataFile(msgspec.Struct, frozen=True):
    filename: str


class _State(msgspec.Struct, frozen=True):
    files: list[_DataFile] = msgspec.field(name="_data_files", default_factory=list[_DataFile])


class _Splits(msgspec.Struct, frozen=True):
    splits: list[str] = []


def folder_files(path: Path, split: str = "") -> list[Path]:
    """The files of a folder, or of one split of it, in order.

    Args:
        split: empty = `train` where the folder has splits.

    Raises:
        ConfigError: no files of a known kind, no such split, or files that belong to no split beside some that do.
    """
    if (path / "state.json").is_file():
        return _saved(path)
    if (path / "dataset_dict.json").is_file():
        return _saved(path / _chosen(path, split, _read(path / "dataset_dict.json", _Splits).splits))
    found = sorted(name for name in path.rglob("*") if _has_rows(name, path))
    if not found:
        raise ConfigError(f"{path}: expected a saved dataset, or .jsonl, .csv or .parquet files in it, found none")
    by_split: dict[str, list[Path]] = {}
    for name in found:
        by_split.setdefault(_split_of(name.relative_to(path)), []).append(name)
    if set(by_split) == {""}:
        if split:
            raise ConfigError(f"{path}: --split {split}: none of its {len(found)} files is named after a split")
        return found
    if "" in by_split:
        raise ConfigError(
            f"{path}: {_names(by_split.pop(''), path)} belongs to no split, other files to {_listed(by_split)}: name one file, "
            "or a folder with the files of one kind only"
        )
    return by_split[_chosen(path, split, list(by_split))]


def _saved(path: Path) -> list[Path]:
    files = [path / entry.filename for entry in _read(path / "state.json", _State).files]
    if not files:
        raise ConfigError(f"{path}: expected the data files of a saved dataset in state.json, found none")
    return files


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: expected what `datasets` saves there: {error}") from error


def _chosen(path: Path, split: str, there: Sequence[str]) -> str:
    wanted = split or DEFAULT_SPLIT
    name = wanted if wanted in there else _SPLITS.get(wanted, wanted)
    if name not in there:
        raise ConfigError(f"{path}: it has the splits {_listed(there)}, found no {wanted!r}: choose one by --split")
    return name


def _has_rows(name: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in name.relative_to(folder).parts)
    return name.is_file() and name.suffix.lower() in _KNOWN and name.name not in _NO_ROWS and not hidden


def _split_of(name: Path) -> str:
    """The split that a file's or a folder's name says; empty for none."""
    for part in (name.stem, *reversed(name.parts[:-1])):
        shard = _SHARD.fullmatch(part)
        words = re.split(r"[-_. ]", part.lower())
        said = next((_SPLITS[word] for word in words if word in _SPLITS), "")
        if said or shard:
            return said or str(shard[1] if shard else "")
    return ""


def _names(files: Sequence[Path], folder: Path) -> str:
    first = str(files[0].relative_to(folder))
    return first if len(files) == 1 else f"{first} (and {len(files) - 1} more)"


def _listed(splits: Sequence[str] | dict[str, list[Path]]) -> str:
    return ", ".join(sorted(splits))
