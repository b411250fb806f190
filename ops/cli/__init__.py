"""The command line. Each command is a thin module: it reads arguments, calls the room that does the work, prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import cyclopts

from ops.cli.arena import app as arena_app
from ops.cli.bench import bench
from ops.cli.run import run
from ops.cli.status import status
from ops.cli.version import version
from ops.cli.worker import worker

EPILOGUE = "Start here:  headrace run examples/quickstart.toml"


def build_app() -> cyclopts.App:
    """The whole command tree."""
    app = cyclopts.App(
        name="headrace",
        help="Asynchronous reinforcement learning of language-model agents on a message broker.",
        help_epilogue=EPILOGUE,
        version_flags=["--version"],
        version=_version,
    )
    app.command(run)
    app.command(worker)
    app.command(arena_app)
    app.command(status)
    app.command(bench)
    app.command(version)
    app.register_install_completion_command()
    return app


def _version() -> str:
    from ops.running.run import VERSION  # noqa: PLC0415 - only when asked

    return VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    result = build_app()(list(sys.argv[1:] if arguments is None else arguments), result_action="return_value")
    return result if isinstance(result, int) else 0
