"""`headrace bridge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
from cyclopts import Parameter

from broker.connect import open_mirror
from broker.settings import ConnectSettings
from ops.cli.failing import plain_errors
from ops.cli.output import console, progress_bar, write_json
from ops.connection import open_run
from ops.logtools.mirror import MirrorPosition, mirror_run
from ops.logtools.patterns import named_runs, parse_pattern
from ops.run_folder import RunFolderError
from ops.stopping import until_stopped
from pipeline.logs import set_up_logs


def _named_run(patterns: list[str]) -> str:
    named = named_runs(patterns)
    if len(named) != 1:
        raise RunFolderError("--from: expected the run beside it (--run ID) or in the patterns (hr.ID.step.trained.>)")
    return named[0]


def bridge(
    patterns: list[str],
    /,
    *,
    to: str,
    run: str | None = None,
    from_url: Annotated[str | None, Parameter(name=["--from"])] = None,
    exchange: str = "headrace",
    user: str = "",
    password_file: str = "",
    position_file: Path | None = None,
    until_end: bool = False,
    quiet: bool = False,
    json: bool = False,
) -> int:
    """Copy messages of a run's log to a RabbitMQ as they come, for teams that only consume there.

    They arrive at a topic exchange with the subject as routing key: bind a queue of your own, for example by
    'hr.*.step.trained.#'. A message may come twice after a restart, with the same message id. Stopped, it goes on later where it was.

    Examples:
        headrace bridge step.trained --to amqp://127.0.0.1:5672/
        headrace bridge 'episode.>' 'group.closed' --run runs/quickstart --to amqps://mq.example.org/
        headrace bridge 'hr.quickstart.step.>' --from nats://127.0.0.1:4222 --to amqp://127.0.0.1:5672/
        headrace bridge '>' --from nats://127.0.0.1:4222 --run quickstart --to amqp://127.0.0.1:5672/ --until-end

    Parameters
    ----------
    patterns
        Topics, or patterns of topics, as for `headrace tap`.
    to
        The RabbitMQ: amqp:// or amqps://.
    run
        A run's folder or name; the newest below ./runs when left out. With --from, the run's id.
    from_url
        Broker of a run whose folder is elsewhere.
    exchange
        Name of the topic exchange there; made when it is missing.
    user
        Login there, before the one in the URL.
    password_file
        File with its password.
    position_file
        Keep the position in this file instead of beside the run's log (for logins that may only read there).
    until_end
        End at the log's present end instead of following it.
    quiet
        No progress.
    json
        One JSON object at the end.
    """
    set_up_logs(process="bridge", level="WARNING")

    async def work() -> int:
        target = run if from_url is None or run is not None else _named_run(patterns)
        settings = ConnectSettings(name="bridge", user=user, password_file=password_file)
        async with (
            open_run(target, url=from_url, name="bridge") as broker,
            open_mirror(to, settings, exchange) as mirror,
        ):
            filters = tuple(dict.fromkeys(parse_pattern(text, broker.run).filter for text in patterns))
            position = MirrorPosition(broker, mirror.place, filters, position_file)
            copied = 0
            bar = progress_bar(quiet=quiet)
            with bar:
                task = bar.add_task("copying", total=None, detail="")

                def show(count: int, sequence: int) -> None:
                    nonlocal copied
                    copied = count
                    bar.update(task, completed=count, detail=f"sequence {sequence:,}")

                with anyio.CancelScope() as scope:
                    async with until_stopped(scope.cancel):
                        await mirror_run(broker, mirror, filters, position, follow=not until_end, on_copied=show)
            return copied

    with plain_errors():
        copied = anyio.run(work)
    if json:
        write_json({"copied": copied})
    else:
        console().print(f"copied {copied:,} messages")
    return 0
