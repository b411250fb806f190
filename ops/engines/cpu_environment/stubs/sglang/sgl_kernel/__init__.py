"""Stands in for SGLang's GPU kernels where there is no GPU: everything can be imported, nothing can be called.

It has no modules of its own: where SGLang finds none it takes the way without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.9"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} is a stand-in: this environment is for CPUs and has no GPU kernels")

    kernel.__name__ = name
    return kernel
