"""Stands in for torchvision where only text models are served: names can be imported, nothing can be made of them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

__version__ = "0.28.0"


class _Named(type):
    """Classes whose attributes are classes of the same kind, so that enum members can be named."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _named(f"{cls.__name__}.{name}")
        setattr(cls, name, found)
        return found


class _StandIn(metaclass=_Named):
    def __init__(self, *_args: object, **_kwargs: object) -> None:
        _refuse(type(self).__name__)


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(f"torchvision's {name} is a stand-in: this environment serves text models only")


def _named(name: str) -> type:
    return _Named(name, (_StandIn,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any `torchvision.x.y` is a module of the same kind."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _attribute


def _attribute(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _named(name)


__getattr__ = _attribute
sys.meta_path.append(_Finder())
