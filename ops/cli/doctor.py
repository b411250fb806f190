"""`headrace doctor [CONFIG | TOPOLOGY]`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

import anyio
from cyclopts import Parameter
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ops.cli.failing import plain_errors
from ops.cli.output import console, write_json
from ops.doctor.checks import Finding, Level, exit_code
from ops.doctor.examine import examine

_MARKS: Final = {
    Level.OK: ("✓", "green"),
    Level.NOTE: ("·", "cyan"),
    Level.WARNING: ("!", "yellow"),
    Level.ERROR: ("✗", "bold red"),
}


def doctor(
    config: str | None = None,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    node: str = "",
    json: bool = False,
) -> int:
    """Look at machine, installation and, with a config or a topology, at everything it needs; each problem with a way out. Nothing is started.

    Exit code 1 when something will not run.

    Examples:
        headrace doctor
        headrace doctor examples/quickstart.toml
        headrace doctor examples/cluster.toml --node head
        headrace doctor my.toml --set gateway.port=8080 --json

    Parameters
    ----------
    config
        A run's TOML file: its values, ports, credentials (never printed), servers and engines are checked too. Of a topology also its nodes'
        addresses, ports, certificates, copies and counts.
    set_
        Overrides such as training.ranks=2. May be repeated.
    node
        topology: the node that this machine is; left out, it is found by its addresses.
    json
        One JSON object: passed, findings.
    """
    with plain_errors():
        findings = anyio.run(partial(examine, config, set_ or (), node=node))
    code = exit_code(findings)
    if json:
        write_json({"passed": code == 0, "findings": findings})
    else:
        _show(findings)
    return code


def _show(findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.level]
        plain = finding.level in (Level.OK, Level.NOTE)
        found = Text(finding.found, style="" if plain else style)
        if finding.fix:
            found.append(f"\n→ {finding.fix}", style="dim" if plain else "")
        table.add_row(Text(mark, style=style), Text(finding.check, style="bold"), found)
    screen = console()
    screen.print(Padding(table, (0, 0, 1, 0)))
    count = {level: sum(finding.level is level for finding in findings) for level in Level}
    errors, warnings = count[Level.ERROR], count[Level.WARNING]
    if errors:
        screen.print(f"[bold red]{errors} to mend[/], {warnings} warnings")
    else:
        screen.print(f"[green]ready[/], {warnings} warnings")
