"""A torch-free stand-in for the optimizer: deterministic, checkpointed, and quick. For tests and chaos of the loop.

Its "weights" are one float64 vector that every row moves, so a step that is lost, doubled or reordered shows in the
digest. It takes part in the loop like any backend: checkpoints, exports, digests.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.messages.training import Manifest
from stages.training.ports import RowArrays, StepResult
from stages.weight_files.safetensors_file import FILE_NAME

_WIDTH: Final = 64


class StandInBackend:
    """One rank, no model."""

    rank = 0
    world_size = 1

    def __init__(self, checkpoint_dir: str, *, keep: int = 2, step_s: float = 0.0) -> None:
        self._dir: Final = Path(checkpoint_dir)
        self._keep: Final = keep
        self._step_s: Final = step_s
        self.weights: npt.NDArray[np.float64] = np.zeros(_WIDTH)

    def resume(self, generation: int = 0) -> int:
        del generation
        steps = self.checkpoint_steps()
        if not steps:
            return 0
        self.weights = np.load(self._folder(steps[-1]) / "weights.npy")
        return steps[-1]

    def rows_needed(self, manifest: Manifest) -> Sequence[int]:
        return range(len(manifest.row_ids))

    def train(self, manifest: Manifest, rows: Mapping[int, RowArrays]) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        advantages = manifest.advantage.as_numpy()
        weights = manifest.loss_weight.as_numpy()
        for index, row in sorted(rows.items()):
            tokens = row.token_ids[row.loss_mask].astype(np.int64) % _WIDTH
            np.add.at(self.weights, tokens, float(advantages[index]) * float(weights[index]))
        self.weights *= 0.999
        num_tokens = int(sum(len(row.token_ids) for row in rows.values()))
        return StepResult(
            digest=xxhash.xxh3_64_hexdigest(self.weights.tobytes()),
            stats={"weight_norm": float(np.linalg.norm(self.weights))},
            num_tokens=num_tokens,
        )

    def save_checkpoint(self, step: int, generation: int) -> None:
        part = self._dir / f".part-{generation}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        np.save(part / "weights.npy", self.weights)
        (part / "meta.json").write_text(json.dumps({"step": step, "generation": generation}), encoding="utf-8")
        target = self._folder(step)
        shutil.rmtree(target, ignore_errors=True)
        part.replace(target)
        for old in self.checkpoint_steps()[: -self._keep]:
            shutil.rmtree(self._folder(old), ignore_errors=True)

    def checkpoint_steps(self) -> Sequence[int]:
        return sorted(
            int(path.parent.name.removeprefix("step-")) for path in self._dir.glob("step-*/meta.json") if path.is_file()
        )

    def export_weights(self, folder: str) -> None:
        target = Path(folder)
        part = target.with_name(f".part-{target.name}-{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        header = json.dumps(
            {"weights": {"dtype": "F64", "shape": [_WIDTH], "data_offsets": [0, self.weights.nbytes]}}
        ).encode()
        (part / FILE_NAME).write_bytes(len(header).to_bytes(8, "little") + header + self.weights.tobytes())
        shutil.rmtree(target, ignore_errors=True)
        part.replace(target)

    def close(self) -> None:
        return

    def _folder(self, step: int) -> Path:
        return self._dir / f"step-{step:07d}"
