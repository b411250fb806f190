"""A worker of a plain stage imports what it needs and nothing heavy besides: a run has many of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "aio_pika", "aiohttp", "httpx", "huggingface_hub", "pandas", "pyarrow", "pygments", "rich", "scipy", "starlette", "textual",
    "tokenizers", "torch", "transformers", "uvicorn",
)  # fmt: skip
_PROGRAM = """
import sys
from ops.cli import build_app
from ops.cli.worker import worker
build_app("worker")
from ops.wiring import _service
_service(sys.argv[1])
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("stage", ["fan_out", "rewards", "assembly", "weights", "retention"])
def test_a_plain_stage_worker_imports_nothing_heavy(stage):
    done = subprocess.run([sys.executable, "-c", _PROGRAM, stage], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"nats", "structlog"} <= loaded
    assert loaded.isdisjoint(HEAVY), sorted(loaded.intersection(HEAVY))


def test_a_library_that_was_hidden_from_another_is_there_for_all_others():
    program = (
        "import broker.jetstream, pipeline, nats.aio.transport as t, aiohttp, rich; print(t.aiohttp, aiohttp.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "aiohttp"]
