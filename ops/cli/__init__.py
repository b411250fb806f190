"""The command line. Each command is a thin module: it reads arguments, calls the room that does the work, prints.

Modules are imported when their command is called: `headrace tap` loads neither the Arena nor the trainer.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Final

import cyclopts

from ops import VERSION
from ops.cli.pipes import forget_stdout, reader_is_gone
from pipeline.logs import set_up_logs

EPILOGUE: Final = "Start here:  headrace run examples/quickstart.toml"
_RUN: Final = cyclopts.Group("Run", sort_key=0)
_LOOK: Final = cyclopts.Group("Look", sort_key=1)
_LOG: Final = cyclopts.Group("The log", sort_key=2)
_MORE: Final = cyclopts.Group("More", sort_key=3)

COMMANDS: Final = (
    ("run", "ops.cli.run:run", _RUN, "Train a policy through all stages on this machine; the same command resumes."),
    ("up", "ops.cli.up:up", _RUN, "Start this node's share of a run on several machines and supervise it."),
    ("down", "ops.cli.up:down", _RUN, "Stop a run on several machines, or let one node leave it."),
    ("scale", "ops.cli.scale:scale", _RUN, "Change how many processes a stage has, while the run goes on."),
    ("deploy", "ops.cli.deploy:app", _RUN, "Files that run a topology under Slurm, systemd or Kubernetes."),
    ("worker", "ops.cli.worker:worker", _RUN, "Run one or several stages of a run in this process."),
    ("engine", "ops.cli.engine:app", _RUN, "Inference servers: list, add, remove, read their logs."),
    ("arena", "ops.cli.arena:app", _RUN, "The local Arena."),
    ("broker", "ops.cli.broker:app", _RUN, "A run's streams and durables on its broker: apply, verify, diff, show."),
    ("preflight", "ops.cli.preflight:preflight", _RUN, "Check a run's Arena streams without launching a task."),
    ("pause", "ops.cli.control:pause", _RUN, "Issue no new groups until resume; what is under way is finished."),
    ("resume", "ops.cli.control:resume", _RUN, "Issue groups again after a pause or a drain."),
    ("drain", "ops.cli.control:drain", _RUN, "Let a run go empty: no new groups until resume or its next start."),
    ("status", "ops.cli.status:status", _LOOK, "What each stage waits for, and since when."),
    ("top", "ops.cli.top:top", _LOOK, "A run as it goes, on one screen, by keyboard."),
    ("tap", "ops.cli.tap:tap", _LOOK, "Watch messages as they come."),
    ("why", "ops.cli.why:why", _LOOK, "The whole life of a group, episode, session, step or row."),
    ("dead", "ops.cli.dead:app", _LOOK, "Messages that a stage gave up: list, show, retry, drop."),
    ("report", "ops.cli.report:report", _LOOK, "A run or a recording as one HTML file that needs no network."),
    ("publish", "ops.cli.publish:app", _LOG, "Put prompts on a run's log."),
    ("record", "ops.cli.record:record", _LOG, "Record a run into one self-describing file."),
    ("replay", "ops.cli.replay:replay", _LOG, "Replay a recording, or compare a stage with it."),
    ("bridge", "ops.cli.bridge:bridge", _LOG, "Copy messages to a RabbitMQ as they come, for teams that only consume."),
    ("inspect", "ops.cli.inspect:inspect", _LOG, "What a recording holds."),
    ("audit", "ops.cli.audit:app", _LOG, "One record per episode, kept or rejected."),
    ("export", "ops.cli.export:export", _LOG, "A run or a recording as Parquet tables."),
    ("schema", "ops.cli.schema:schema", _LOG, "JSON Schema of every message."),
    ("chaos", "ops.cli.chaos:chaos", _MORE, "Play faults on a run of its own and account for everything."),
    ("bench", "ops.cli.bench:bench", _MORE, "Measure one part beside a bare reference."),
    (
        "doctor",
        "ops.cli.doctor:doctor",
        _MORE,
        "Whether this machine and a config can run, with a fix for each finding.",
    ),
    ("version", "ops.cli.version:version", _MORE, "Versions of headrace and of what it stands on."),
)


def build_app(called: str = "") -> cyclopts.App:
    """The whole command tree.

    Args:
        called: the command on the command line: it shows its own docstring, the others their line here, unimported.
    """
    app = cyclopts.App(
        name="headrace",
        help="Asynchronous reinforcement learning of language-model agents on a message broker.",
        help_epilogue=EPILOGUE,
        version=VERSION,
        help_format="plaintext",
    )
    for name, path, group, text in COMMANDS:
        if name == called:
            app.command(path, name=name, group=group)
        else:
            app.command(path, name=name, group=group, help=text)
    app.register_install_completion_command()
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    set_up_logs(process=given[0] if given else "headrace", level="WARNING")
    try:
        result = build_app(given[0] if given else "")(given, result_action="return_value")
        sys.stdout.flush()
    except KeyboardInterrupt:  # before the command listens to signals itself
        return 128 + signal.SIGINT
    except (OSError, BaseExceptionGroup):
        if not reader_is_gone():
            raise
        forget_stdout()
        return 128 + signal.SIGPIPE
    return result if isinstance(result, int) else 0
