"""What the training loop needs from whoever computes the step.

Shapes: R rows of the step; T tokens of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.messages.training import Manifest


class RowArrays(msgspec.Struct, frozen=True, kw_only=True):
    """One row's tokens, as fetched."""

    token_ids: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]"""
    logprobs: npt.NDArray[np.float32]
    """[T] behaviour log-probs, 0 where nothing was sampled."""
    versions: npt.NDArray[np.int32]
    """[T] -1 where nothing was sampled."""
    turns: npt.NDArray[np.int32]
    """[T] interaction ordinal of each token."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did."""

    digest: str
    """xxh3 over the weights after the step."""
    stats: Mapping[str, float]
    """Global over all ranks."""
    skipped: str = ""
    """Why no update was made."""
    num_tokens: int
    """Tokens of the step, over all ranks."""
    model_flops: float = 0.0
    """Arithmetic of forward and backward over all ranks, without recomputed activations; 0: not known."""
    peak_flops: float = 0.0
    """What all ranks' devices could do in a second; 0: not known."""


class TrainerBackend(Protocol):
    """Computes steps. All calls block and come from one thread; with several ranks each rank makes the same calls in the
    same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def resume(self, generation: int = 0) -> int:
        """Load the newest whole checkpoint; the step it stands after, 0 for none. An incarnation with a generation supersedes
        what earlier ones have written, or will write, beyond that step.
        """
        ...

    def rows_needed(self, manifest: Manifest) -> Sequence[int]:
        """The indices of the rows that this rank computes: a pure function of manifest, world size and budget."""
        ...

    def train(self, manifest: Manifest, rows: Mapping[int, RowArrays]) -> StepResult:
        """One step over its rows (by index into the manifest)."""
        ...

    def save_checkpoint(self, step: int, generation: int) -> None:
        """Weights, optimizer, RNG and position, atomically."""
        ...

    def checkpoint_steps(self) -> Sequence[int]:
        """The steps whose checkpoints are kept and whole, ascending."""
        ...

    def export_weights(self, folder: str) -> None:
        """An ordinary HF folder (safetensors), visible only when complete. Rank 0 writes, all call."""
        ...

    def close(self) -> None: ...
