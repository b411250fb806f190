"""`headrace preflight CONFIG`."""

from __future__ import annotations

from typing import Annotated

import anyio
import msgspec
from cyclopts import Parameter
from rich.table import Table

from ops.cli.failing import plain_errors
from ops.cli.output import console, write_json
from ops.config import load_config
from ops.preflight import run_preflight
from stages.clients.arena.preflight import PreflightReport


def preflight(
    config: str,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    allow_unhealthy: bool = False,
    json: bool = False,
) -> int:
    """Check every Arena stream of a config before a run: id, status, reward, harness, dataset, health of its last 100 tasks, and the
    model gateway's key. No task is launched. Exit code 0: the run may start; 1: it should not.

    Examples:
        headrace preflight examples/quickstart.toml --allow-unhealthy

    Parameters
    ----------
    config
        A run's TOML file.
    set_
        Overrides such as arena.route=gateway. May be repeated.
    allow_unhealthy
        A stream without ended tasks, or with many failed ones, stops nothing.
    json
        One JSON object: passed, streams, problems, allow_unhealthy.
    """
    with plain_errors():
        loaded = load_config(config, set_ or ())

        async def work() -> PreflightReport:
            return await run_preflight(loaded, allow_unhealthy=allow_unhealthy)

        report = anyio.run(work)
    if json:
        write_json({"passed": report.passed, **msgspec.to_builtins(report)})
    else:
        _show(report)
    return report.exit_code


def _show(report: PreflightReport) -> None:
    table = Table("stream", "harness", "protocol", "reward", "rows", "ended", "failed", "envs", box=None)
    for stream in report.streams:
        ended, failed = str(stream.terminal_tasks), str(stream.failed_tasks)
        envs = " ".join(stream.env_names)
        table.add_row(
            stream.name, stream.harness, stream.protocol, stream.reward, f"{stream.num_rows:,}", ended, failed, envs
        )
    console().print(table)
    problems = [*report.problems, *(problem for stream in report.streams for problem in stream.problems)]
    for problem in problems:
        waived = " (waived)" if problem.waivable and report.allow_unhealthy else ""
        console().print(f"{problem.check}: {problem.text}{waived}", markup=False)
    unhealthy = bool(problems) and all(problem.waivable for problem in problems)
    waive = " --allow-unhealthy passes over health, as of a stream that has played nothing yet." if unhealthy else ""
    console().print("The run may start." if report.passed else f"The run should not start.{waive}", markup=False)
