"""What Megatron-Core needs to be built and run without CUDA. For tests on CPU only: the backend enters it nowhere else.

Two parts: module functions of `torch.cuda` are replaced for the whole process for as long as a backend is open; tensors asked for
on "cuda" are made on the CPU by a mode of torch's, which belongs to a thread and so is entered around each call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

from stages.training.errors import TrainingError

_TRACKER: Final = "_CUDA_RNG_STATE_TRACKER"


class _NoTracker:
    """Random states are the CPU's own; nothing is dropped out."""

    def is_initialized(self) -> bool:
        return False

    @contextmanager
    def fork(self, name: str = "") -> Generator[None]:
        del name
        yield


@contextmanager
def megatron_on_cpu() -> Generator[None]:
    """For as long as this is open, "the current CUDA device" is the CPU.

    Raises:
        TrainingError: there is CUDA, and so no need.
    """
    if torch.cuda.is_available():
        raise TrainingError("the CPU stand-ins for Megatron-Core are for machines without CUDA, and this one has it")
    module: Any = megatron_random  # the tracker is a private global of Megatron's
    device, synchronize, tracker = torch.cuda.current_device, torch.cuda.synchronize, getattr(module, _TRACKER)
    torch.cuda.synchronize = _nothing_to_wait_for
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue] - a device in place of its number
    setattr(module, _TRACKER, _NoTracker())
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = device, synchronize
        setattr(module, _TRACKER, tracker)


def _nothing_to_wait_for(device: object = None) -> None:
    del device


class CudaMeansCpu(TorchFunctionMode):
    """While it is entered, in this thread: `device="cuda"` is the CPU, and `.cuda()` changes nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's function gives
        del types
        if func is torch.Tensor.cuda:
            return args[0]
        given = dict(kwargs or {})
        if _is_cuda(given.get("device")):
            given["device"] = torch.device("cpu")
        return func(*args, **given)


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
