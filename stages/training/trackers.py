"""Experiment trackers: where a step's statistics go beside the run's log, by the port of `metric_sinks`.

None of them needs a network: W&B writes an offline run, trackio a local database. A tracker's own login and server are set by
its own environment (`WANDB_MODE=online`, `TRACKIO_SPACE_ID` …), never by a run's config.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stages.training.errors import TrainingError
from stages.training.metric_sinks import MetricSink, TensorBoardSink

TRACKERS: Final = ("tensorboard", "wandb", "trackio")
PROJECT: Final = "headrace"


class WandbSink:
    """A W&B run with the run's id; offline unless WANDB_MODE says otherwise: `wandb sync` uploads it."""

    def __init__(self, folder: str | Path, run: str, config: Mapping[str, Any]) -> None:
        """Check that W&B is there.

        Args:
            folder: where its files go.
            run: the run's id.
            config: what the run was started with, without secrets.

        Raises:
            TrainingError: it isn't installed.
        """
        self._wandb = _installed("wandb")
        self._folder = Path(folder)
        self._run_id = run
        self._config = dict(config)
        self._run: Any = None  # wandb's run is untyped

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=self._run_id,
                name=self._run_id,
                dir=str(self._folder),
                mode=os.environ.get("WANDB_MODE", "offline"),
                resume="allow",
                config=self._config,
                settings=self._wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
            # Steps that come again after a resume have W&B's own counter ahead of them: they count by a field of ours.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        self._run.log({**values, "step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class TrackioSink:
    """A trackio run in the folder of the run; `trackio show` draws it."""

    def __init__(self, folder: str | Path, run: str, config: Mapping[str, Any]) -> None:
        """As `WandbSink`.

        Raises:
            TrainingError: trackio isn't installed.
        """
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # read when trackio is imported
        self._trackio = _installed("trackio")
        self._run_id = run
        self._config = dict(config)
        self._open = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._open:
            self._trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=self._run_id,
                resume="allow",
                config=self._config,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            self._open = True
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        if self._open:
            self._trackio.finish()


def open_tracker(name: str, folder: Path, run: str, config: Mapping[str, Any]) -> MetricSink:
    """A tracker by its name in `training.trackers`; its files lie in a folder of that name below `folder`.

    Raises:
        TrainingError: not a tracker, or not installed.
    """
    match name:
        case "tensorboard":
            return TensorBoardSink(folder / name)
        case "wandb":
            return WandbSink(folder / name, run, config)
        case "trackio":
            return TrackioSink(folder / name, run, config)
        case _:
            raise TrainingError(f"training.trackers: expected some of {', '.join(TRACKERS)}, found {name!r}")


def _installed(package: str) -> Any:  # Any: modules without types
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise TrainingError(
            f"training.trackers: {package} is not installed: pip install 'headrace[trackers]'"
        ) from error
