"""Functions that a config names are found without importing them, wherever Python would find them."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec
import pytest

from ops.config_imports import check_imports
from schemas.config import EngineSection, GatewaySection
from schemas.config_arena import StreamConfig
from schemas.errors import ConfigError


def check(path: str) -> None:
    stream = StreamConfig(name="s", stream_id="s", reward_transform=path)
    check_imports([stream], msgspec.convert({}, EngineSection), msgspec.convert({}, GatewaySection), [])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("bare/inner", "whole"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rewards.py").write_text("raise RuntimeError('imported')\ndef mine(x): return x\n")
    (tmp_path / "whole" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", ["bare.inner.rewards:mine", "whole.rewards:mine"])
def test_modules_of_packages_with_and_without_an_init_file_are_found(place, path: str) -> None:
    check(path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("bare.inner.rewards:yours", "has no 'yours'"),
        ("bare.other.rewards:mine", "no module 'bare.other.rewards'"),
        ("whole.rewards.deeper:mine", "no module"),
        ("nowhere:mine", "no module 'nowhere'"),
    ],
)
def test_what_is_not_there_is_named(place, path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(path)


def test_a_module_that_another_finder_knows_is_found(place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Editable(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            return PathFinder.find_spec("rewards", [str(place / "whole")]) if name == "elsewhere" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])
    check("elsewhere:mine")
