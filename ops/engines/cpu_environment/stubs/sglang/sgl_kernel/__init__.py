"""Stands in for SGLang's GPU kernels where there is no GPU: everything can be imported, nothing can be called.

It has no modules of its own: where SGLang finds none it takes the way without them.

SGLang's LoRA layers ask torch for pinned memory without looking whether there is any, which ends the server where there is none.
For them, asking for it gives ordinary memory here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.9"
_MAKERS = ("tensor", "zeros", "empty")


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:  # Any: whatever torch's function takes and gives
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        del pin_memory
        return make(*args, **kwargs)

    return made


def _itself(self: torch.Tensor, device: object = None) -> torch.Tensor:
    del device
    return self


if not torch.cuda.is_available():
    for _name in _MAKERS:
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = _itself


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} is a stand-in: this environment is for CPUs and has no GPU kernels")

    kernel.__name__ = name
    return kernel
