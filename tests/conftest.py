"""Fixtures of all rooms."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import structlog

# importlib mode leaves sys.path alone, and tests of all rooms import what they share by name.
sys.path.insert(0, str(Path(__file__).parent))
import waiting

# how long an example takes says nothing about it on a busy machine
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")

WaitUntil = Callable[..., Awaitable[Any]]


@pytest.fixture
def wait_until() -> WaitUntil:
    """Await a condition (a plain or async callable) with a deadline."""
    return waiting.wait_until


@pytest.fixture
def mini_swe_agent() -> str:
    """The `command` of a local Arena's harness that runs the real mini-swe-agent, in TOML."""
    program = Path(os.environ.get("HEADRACE_CACHE", Path.home() / ".cache" / "headrace")) / "clients/mini/bin/mini"
    if not program.exists():
        reason = f"{program} is missing: run tests/resources/install_clients.sh"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return f"""command = [
  {json.dumps(str(program))}, "-y", "--exit-immediately", "-m", "openai/{{model}}", "-t", "{{prompt}}",
  "-o", "{{workdir}}/trajectory.json", "-c", "mini.yaml", "-c", 'model.model_kwargs.extra_headers={{headers_json}}',
]"""


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Whatever sets logging up in this process (a command called in a test) is undone for the next test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_configure() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def commands() -> Callable[[Iterable[psutil.Process]], list[tuple[psutil.Process, str]]]:
    """Processes with their command lines; those that have ended, reaped or not, are left out."""

    def found(processes: Iterable[psutil.Process]) -> list[tuple[psutil.Process, str]]:
        lines: list[tuple[psutil.Process, str]] = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # psutil's ZombieProcess is one
                lines.append((process, " ".join(process.cmdline())))
        return lines

    return found
