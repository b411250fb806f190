"""The determinism switch of a trainer's process: set once, before anything of torch runs and caches its choice."""

from __future__ import annotations

import os

import torch


def set_determinism(*, seed: int, threads: int) -> None:
    """Make this process's torch repeatable; call it before anything of torch runs. Bitwise on CPU for a given `threads`."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
