"""Where a step's statistics go beside the run's log: TensorBoard here, others in `trackers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from stages.training.errors import TrainingError


class MetricSink(Protocol):
    """Takes each step's statistics, in order of the steps; after a resume some steps come again."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in a folder; what a former incarnation wrote of steps that come again is hidden."""

    def __init__(self, folder: str | Path) -> None:
        """Check that TensorBoard can be written.

        Raises:
            TrainingError: it isn't installed.
        """
        try:
            from torch.utils.tensorboard.writer import SummaryWriter  # noqa: PLC0415 - only where it is asked for
        except ImportError as error:
            raise TrainingError(
                "training.trackers: tensorboard is not installed: pip install 'headrace[train]'"
            ) from error
        self._open = SummaryWriter
        self._folder = str(folder)
        self._writer: Any = None  # torch's writer is untyped

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open(self._folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
