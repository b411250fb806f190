"""Draws a run's progress on a terminal, and its summary at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ops.config import staleness_bound
from ops.engines.plan import has_servers
from ops.evaluations import GAUGE_PREFIX, Evaluation
from ops.run_account import RunAccount
from ops.running.progress import STALE_REPORT_S, Progress
from ops.wiring import FROM_RUN_STAGES, STAGES
from pipeline.metrics import WorkerReport

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as a line of bars between their least and greatest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)


def draw(progress: Progress, *, width: int) -> Group:
    """The whole screen."""
    return Group(_head(progress, width), _stages(progress, wide=width >= 100))


def _head(progress: Progress, width: int) -> Panel:
    config = progress.config
    rewards = [progress.rewards[step] for step in sorted(progress.rewards)]
    trainer = progress.reports.get("trainer")
    sampling = progress.reports.get("sampling")
    gateway = progress.reports.get("gateway")
    bound = staleness_bound(config)
    steps = "∞" if config.run.steps is None else str(config.run.steps)
    lines = [
        f"step {progress.step}/{steps}   reward {rewards[-1]:.3f} {sparkline(rewards, max(10, width - 50))}"
        if rewards
        else f"step 0/{steps}   no step trained yet",
        "groups "
        + "  ".join(
            f"{name} {int(_gauge(sampling, f'groups_{name}'))}" for name in ("issued", "running", "waiting", "trained")
        ),
        "   ".join(
            (
                f"staleness {int(_gauge(trainer, 'staleness'))} of {'any' if bound is None else bound}",
                f"sampling {_gauge(gateway, 'tokens_per_s'):,.0f} tok/s",
                f"training {_gauge(trainer, 'tokens_per_s'):,.0f} tok/s",
                f"step {_gauge(trainer, 'step_s'):.2f} s",
            )
        ),
    ]
    if sampling is not None:
        lines += evaluation_lines(sampling.gauges)
    return Panel("\n".join(lines), title=f"run {config.run.id}", title_align="left", border_style="cyan")


def evaluation_lines(gauges: Mapping[str, float]) -> list[str]:
    """One line for each evaluated stream, from the gauges of sampling's report."""
    end = ".version"
    streams = [
        name[len(GAUGE_PREFIX) : -len(end)] for name in gauges if name.startswith(GAUGE_PREFIX) and name.endswith(end)
    ]
    lines: list[str] = []
    for stream in sorted(streams):
        prefix = f"{GAUGE_PREFIX}{stream}"
        value, low, high = (gauges.get(f"{prefix}.pass@1{end}", 0.0) for end in ("", "_low", "_high"))
        version = int(gauges[f"{prefix}.version"])
        lines.append(f"evaluation {stream} at version {version}: pass@1 {value:.3f} [{low:.3f}, {high:.3f}]")
    return lines


def _stages(progress: Progress, *, wide: bool) -> Table:
    table = Table(expand=True, box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for name in ("in", "out", "waiting", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        for name in ("retried", "dead"):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waits for", overflow="ellipsis", no_wrap=True, ratio=1)
    now = time.time()
    with_servers = ("engine",) if has_servers(progress.config.engine) else ()
    for stage in FROM_RUN_STAGES if progress.config.run.from_run else (*with_servers, *STAGES):
        report = progress.reports.get(stage)
        if report is None:
            table.add_row(stage, *["·"] * (6 if wide else 4), Text("starting", style="dim"))
            continue
        stale = now - report.unix_time_s > STALE_REPORT_S
        numbers = [report.received, report.published, progress.pending.get(stage, 0), report.in_flight]
        if wide:
            numbers += [report.retried, report.dead]
        table.add_row(stage, *(f"{number:,}" for number in numbers), _waits(report, now, stale=stale))
    return table


def _waits(report: WorkerReport, now: float, *, stale: bool) -> Text:
    if stale:
        return Text(f"no sign of life for {now - report.unix_time_s:.0f} s", style="bold red")
    error = report.labels.get("weights_error")
    if error:
        return Text(error, style="red")
    if not report.waiting_for:
        return Text("working", style="green")
    since = now - report.waiting_since_unix_s
    style = "yellow" if since > 10 else "dim"
    return Text(f"{report.waiting_for} ({since:.0f} s)" if since >= 1 else report.waiting_for, style=style)


def _gauge(report: WorkerReport | None, name: str) -> float:
    return 0.0 if report is None else report.gauges.get(name, 0.0)


def _evaluation_line(evaluation: Evaluation) -> str:
    values = "  ".join(f"pass@{one.k} {one.value:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in evaluation.pass_at_k)
    rejected = f", {evaluation.num_rejected} rejected" if evaluation.num_rejected else ""
    over = f"{evaluation.num_tasks} tasks, {evaluation.num_rollouts} rollouts{rejected}"
    return f"version {evaluation.version}: {values or 'no verdict'}  ({over}{'' if evaluation.complete else ', not complete'})"


def print_summary(account: RunAccount, console: Console, *, folder: str, interrupted: bool) -> None:
    """The readable end of a run."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    rewards = account.reward_by_step
    if rewards:
        first, last = rewards[:3], rewards[-10:]
        table.add_row(
            "reward",
            f"{sum(first) / len(first):.3f} (first {len(first)} steps) → {sum(last) / len(last):.3f} (last {len(last)})  "
            + sparkline(rewards, 40),
        )
    groups, episodes = account.groups, account.episodes
    table.add_row("steps", f"{account.steps} trained, {account.trained_rows} rows, {account.seconds:.1f} s")
    dropped = ", ".join(f"{count} {reason}" for reason, count in account.dropped_by_reason.items())
    table.add_row(
        "groups",
        f"{groups.issued} issued = {groups.trained} trained + {groups.dropped} dropped{f' ({dropped})' if dropped else ''}"
        f" + {groups.open} open + {account.unexplained} unexplained",
    )
    table.add_row(
        "episodes", f"{episodes.requested} requested, {episodes.ended} ended, {episodes.rejected} slots rejected"
    )
    bound = account.staleness.bound
    table.add_row(
        "staleness", f"at most {account.staleness.max}, " + ("no bound" if bound is None else f"bound {bound}")
    )
    for evaluation in account.evaluations:
        table.add_row(f"evaluation {evaluation.stream}", _evaluation_line(evaluation))
    table.add_row("dead letters", str(account.dead_letters))
    table.add_row("folder", folder)
    title = "run interrupted; the same command resumes it" if interrupted else "run finished"
    console.print(Panel(table, title=title, title_align="left", border_style="yellow" if interrupted else "green"))
    if account.unexplained or account.doubled:
        console.print(
            f"[bold red]{account.unexplained} unexplained, {account.doubled} doubled groups: please report this[/]"
        )
