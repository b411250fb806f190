"""What Megatron-Core needs to be built without CUDA. For tests on CPU only: the backend enters it nowhere else."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
from megatron.core.tensor_parallel import random as megatron_random

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
    device, tracker = torch.cuda.current_device, getattr(module, _TRACKER)
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue] - a device in place of its number
    setattr(module, _TRACKER, _NoTracker())
    try:
        yield
    finally:
        torch.cuda.current_device = device
        setattr(module, _TRACKER, tracker)
