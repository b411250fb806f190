"""How a model looks, in Rich's tables and texts: pure, for any width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from ops.engines.listening import STYLES
from ops.logtools.plain import duration, size
from ops.running.progress import STALE_REPORT_S
from ops.running.screen import sparkline
from ops.status import pacing
from ops.top.model import Backlog, GroupLine, Model, Worker
from ops.troubles import ADVICE, Trouble
from ops.wiring import STAGES
from pipeline.watchdog import WATCHDOG
from schemas.messages.engines import EngineState

WIDE: Final = 120
TROUBLES_SHOWN: Final = 4
_LONG_WAIT_S: Final = 30.0
_SOFT: Final = "#b48ead"
"""Neither good nor an error."""
GROUP_COLUMNS: Final = ("group", "stream", "slots", "reward", "age", "state")


def head(model: Model, width: int, now_s: float) -> Text:
    """Where the run is, and below what is wrong: a line for each trouble, at the most `TROUBLES_SHOWN`."""
    text = Text.assemble((f"run {model.run}", "bold"), f"   step {model.trained_step}")
    rest = f"   staleness {model.staleness[-1]}" if model.staleness else ""
    rest += f"   {duration(model.step_seconds[-1])} a step" if model.step_seconds else ""
    if model.rewards:
        values = [reward for _, reward in model.rewards]
        text.append(f"   reward {values[-1]:.3f} ")
        room = min(60, width - text.cell_len - len(rest))
        text.append(sparkline(values, room) if room > 0 else "", "cyan")
    text.append(rest)
    text.append("\n")
    if model.problem:
        text.append(f"the broker does not answer: {model.problem}", "bold red")
    elif not model.position:
        text.append("reading the log …", "dim")
    elif not model.is_running:
        text.append("not running: this is what its log holds", "yellow")
    elif (wrong := model.troubles(now_s)) or model.asked.word:
        if model.asked.word:
            why = f" ({model.asked.reason})" if model.asked.reason else ""
            text.append(f"{model.asked.word}{why}: r goes on" + ("\n" if wrong else ""), "bold yellow")
        text.append(Text("\n").join(_trouble_lines(wrong, width)))
    else:
        text.append(f"log {model.log_messages:,} messages, {size(model.log_bytes)}", "dim")
        keys = [
            name for name in ("step_loss", "entropy", "approx_kl", "grad_norm", "mismatch/kl") if name in model.stats
        ]
        text.append("".join(f"   {name} {model.stats[name]:.3g}" for name in keys), "dim")
    lines = text.split("\n")
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _trouble_lines(wrong: Sequence[Trouble], width: int) -> list[Text]:
    """The worst ones, each with what a person may do where there is room for all of it."""
    lines: list[Text] = []
    for number, trouble in enumerate(wrong[:TROUBLES_SHOWN], start=1):
        line = Text(str(trouble), "bold red")
        if number == TROUBLES_SHOWN < len(wrong):
            more = f"; and {len(wrong) - TROUBLES_SHOWN} more: headrace status"
            line.truncate(max(1, width - len(more)), overflow="ellipsis")
            line.append(more)
        advice = f"  → {ADVICE[trouble.kind]}"
        if line.cell_len + len(advice) <= width:
            line.append(advice, "not bold dim")
        lines.append(line)
    return lines


def stages(model: Model, width: int, now_s: float) -> Table:
    """Each stage: speed, what waits before it, how long, errors, what it waits for."""
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("stage", no_wrap=True)
    names = ("workers", "in/s", "out/s", "lag", "oldest", "busy", "retried", "dead") if wide else (
        "in/s", "out/s", "lag", "oldest", "dead")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waits for", ratio=1, no_wrap=True, overflow="ellipsis")
    seen = {stage for stage, _ in model.workers} - {WATCHDOG}
    for stage in (*STAGES, *sorted(seen - set(STAGES))):
        workers = [worker for (name, _), worker in sorted(model.workers.items()) if name == stage]
        cells = _stage_cells(model, stage, workers, now_s)
        table.add_row(stage, *(cells[name] for name in names), _waits(model, workers, now_s))
    return table


def _stage_cells(model: Model, stage: str, workers: Sequence[Worker], now_s: float) -> dict[str, Text]:
    backlog = model.backlogs.get(stage, Backlog(count=0))
    age_s = now_s - backlog.oldest_unix_s if backlog.oldest_unix_s else 0.0
    dead = max(sum(worker.report.dead for worker in workers), model.dead.get(stage, 0))
    return {
        "workers": _number(len(workers)),
        "in/s": _rate(sum(worker.received_per_s for worker in workers)),
        "out/s": _rate(sum(worker.published_per_s for worker in workers)),
        "lag": Text(f"{backlog.count:,}{'+' if backlog.at_least else ''}", style="" if backlog.count else "dim"),
        "oldest": Text(
            duration(age_s) if backlog.count else "·",
            style="dim" if not backlog.count else "yellow" if age_s > _LONG_WAIT_S else "",
        ),
        "busy": _number(sum(worker.report.in_flight for worker in workers)),
        "retried": _number(sum(worker.report.retried for worker in workers)),
        "dead": Text(f"{dead}", style="bold red" if dead else "dim"),
    }


def _number(value: int) -> Text:
    return Text(f"{value:,}", style="" if value else "dim")


def _rate(value: float) -> Text:
    return Text(f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}", style="" if value else "dim")


def _waits(model: Model, workers: Sequence[Worker], now_s: float) -> Text:
    if not workers:
        return Text("no worker says anything", style="bold red") if model.is_running else Text("")
    silent_s = now_s - max(worker.report.unix_time_s for worker in workers)
    if silent_s > STALE_REPORT_S:
        return Text(f"no sign of life for {silent_s:.0f} s", style="bold red")
    errors = [
        text for worker in workers for name, text in worker.report.labels.items() if name.endswith("_error") and text
    ]
    if errors:
        return Text(errors[0], style="red")
    waiting = [worker.report for worker in workers if worker.report.waiting_for]
    if len(waiting) < len(workers):
        return Text("working", style="green")
    longest = min(waiting, key=lambda report: report.waiting_since_unix_s)
    since_s = now_s - longest.waiting_since_unix_s
    text = f"{longest.waiting_for} ({since_s:.0f} s)" if since_s >= 1 else longest.waiting_for
    return Text(text, style="yellow" if since_s > _LONG_WAIT_S else "dim")


def engines(model: Model, now_s: float, width: int) -> Table:
    """Servers behind the router, or gateways with the engine in them: state, version, load, speed; what binds capacity."""
    table = servers(model, now_s) if model.engines else _gateways(model)
    sampling = next((worker.report for (stage, _), worker in model.workers.items() if stage == "sampling"), None)
    if sampling is not None and "capacity" in sampling.gauges:
        narrow = width < WIDE
        table.caption = Text(pacing(sampling), style="dim", no_wrap=narrow, overflow="ellipsis" if narrow else None)
        table.caption_justify = "left"
    return table


def servers(model: Model, now_s: float) -> Table:
    """One line a server."""
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("engine", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("state", no_wrap=True, overflow="ellipsis", ratio=2)
    for name in ("version", "load", "queued", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in sorted(model.engines.items()):
        silent_s = now_s - one.unix_time_s
        serving = one.state is EngineState.SERVING
        state = Text(one.state.value if serving else f"{one.state.value}: {one.reason}", style=STYLES[one.state])
        if silent_s > STALE_REPORT_S and model.is_running:
            state = Text(f"no sign of life for {silent_s:.0f} s", style="bold red")
        table.add_row(
            name,
            state,
            Text(f"{one.version}", style="yellow" if model.trained_step - one.version > 1 else ""),
            f"{one.running}/{one.capacity}",
            _number(one.waiting),
            Text(f"{one.num_restarts}", style="yellow" if one.num_restarts else "dim"),
        )
    return table


def _gateways(model: Model) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("engine", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("version", "running", "waiting", "sessions", "tok/s", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for (stage, name), worker in sorted(model.workers.items()):
        if stage != "gateway":
            continue
        gauges = worker.report.gauges
        version, failed = int(gauges.get("version", 0)), int(gauges.get("failed_calls", 0))
        behind = model.trained_step - version > 1
        table.add_row(
            name,
            Text(f"{version}", style="yellow" if behind else ""),
            *(_number(int(gauges.get(key, 0))) for key in ("running", "waiting", "sessions", "tokens_per_s")),
            Text(f"{failed}", style="red" if failed else "dim"),
        )
    if not table.row_count:
        table.add_row(Text("none", style="dim"), *[""] * 6)
    return table


def rewards(model: Model, width: int) -> Table:
    """Each stream's latest reward, its mean over ten steps, its history; then staleness."""
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("reward of stream", no_wrap=True, overflow="ellipsis", max_width=max(16, width // 3))
    table.add_column("last", justify="right", no_wrap=True)
    table.add_column("last 10", justify="right", no_wrap=True)
    room = max(8, width - max(16, width // 3) - 20)
    table.add_column("history", ratio=1, no_wrap=True, overflow="crop")
    for stream, values in sorted(model.stream_rewards.items()):
        recent = list(values)[-10:]
        table.add_row(
            stream,
            f"{values[-1]:.3f}",
            f"{sum(recent) / len(recent):.3f}",
            Text(sparkline(list(values), room), style="cyan"),
        )
    if not model.stream_rewards:
        table.add_row(Text("no step yet", style="dim"), "", "", "")
    if model.staleness:
        recent_staleness = list(model.staleness)[-10:]
        mean = sum(recent_staleness) / len(recent_staleness)
        history = Text(sparkline([float(value) for value in model.staleness], room), style=_SOFT)
        table.add_row(Text("staleness", style="dim"), f"{model.staleness[-1]}", f"{mean:.1f}", history)
    return table


def group_counts(model: Model) -> str:
    """The title over the groups."""
    sampling = next((worker.report.gauges for (stage, _), worker in model.workers.items() if stage == "sampling"), {})
    if not sampling:
        return "groups"
    told = ("issued", "running", "waiting", "trained")
    return "groups: " + ", ".join(f"{sampling.get(f'groups_{name}', 0):,.0f} {name}" for name in told)


def group_cells(line: GroupLine, now_s: float) -> list[Text]:
    """A group's line in the list."""
    style = (
        "green" if line.state.startswith("trained") else _SOFT if line.state.startswith("dropped") else
        "yellow" if line.state == "running" else ""
    )  # fmt: skip
    slots = f"{line.ready}/{line.num_slots}" + (f" −{line.rejected}" if line.rejected else "")
    reward = "·" if line.reward is None else f"{line.reward:.3f}"
    age = duration(max(0.0, now_s - line.issued_unix_s))
    return [
        Text(line.group),
        Text(line.stream),
        Text(slots),
        Text(reward),
        Text(age, style="dim"),
        Text(line.state, style=style),
    ]
