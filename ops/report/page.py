"""The page: one HTML file with its style and charts inside; no script, no font, no address. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final

from ops.logtools.plain import duration, moment
from ops.report.charts import Series, bars, line_chart, short
from ops.report.figures import ReportFigures, StepFigures
from ops.report.style import STYLE
from ops.run_account import HarnessClasses
from ops.troubles import ADVICE
from schemas.messages.rollout import EpisodeClass

_LOSSES: Final = (
    "step_loss", "entropy", "ratio", "clip_fraction", "approx_kl", "grad_norm", "critic_loss", "critic_grad_norm", "lr",
)  # fmt: skip
"""Statistics of an update that get a chart first, in this order."""
_CHARTS_OF_STATS: Final = 10
_RECENT: Final = 10
_SKIPPED_SHOWN: Final = 20


def page(figures: ReportFigures) -> str:
    """A whole report."""
    title = f"headrace: run {figures.run}"
    body = "".join(
        (
            _head(figures),
            _section("Wrong when this was made", _troubles(figures)),
            _tiles(figures),
            _section("Learning", _learning(figures)),
            _section("Update", _update(figures)),
            _section("Speed", _speed(figures)),
            _section("Where groups went", _groups(figures)),
            _section("Faults", _faults(figures)),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _head(figures: ReportFigures) -> str:
    parts = [
        f"{moment(figures.first_unix_s)[:-5]} – {moment(figures.last_unix_s)[:-5]} UTC" if figures.first_unix_s else "",
        f"started {figures.num_starts} times" if figures.num_starts > 1 else "",
        f"streams {', '.join(figures.streams)}" if figures.streams else "",
        f"estimator {figures.estimator}" if figures.estimator else "",
        "its beginning was purged: charts and waits are of what is kept" if figures.purged_up_to else "",
        f"headrace {figures.headrace_version}" if figures.headrace_version else "",
    ]
    line = " · ".join(escape(part) for part in parts if part)
    return f'<header><h1>Run {escape(figures.run)}</h1><p>{line}</p><p class="dim">{escape(figures.place)}</p></header>'


def _tiles(figures: ReportFigures) -> str:
    account = figures.account
    rewards = account.reward_by_step
    reward = "–"
    if rewards:
        first, last = rewards[:3], rewards[-_RECENT:]
        reward = f"{sum(first) / len(first):.3f} → {sum(last) / len(last):.3f}"
    bound = account.staleness.bound
    letters = account.dead_letters
    tiles = (
        ("steps trained", f"{account.steps:,}", ""),
        ("reward, first → last steps", reward, ""),
        ("time", duration(account.seconds), ""),
        ("rows trained", f"{account.trained_rows:,}", ""),
        ("staleness, at most", f"{account.staleness.max}" + ("" if bound is None else f" of {bound}"), ""),
        ("groups unexplained", f"{account.unexplained}", "bad" if account.unexplained else "good"),
        ("dead letters", f"{letters}", "bad" if letters else "good"),
    )
    return '<div class="tiles">' + "".join(
        f'<div class="tile {style}"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value, style in tiles
    ) + "</div>"  # fmt: skip


def _troubles(figures: ReportFigures) -> Iterable[str]:
    if figures.troubles:
        rows = [(one.kind.value, one.what, one.text, ADVICE[one.kind]) for one in figures.troubles]
        head = ("what", "where", "what is known of it", "what to do")
        yield _card("", _table(head, rows), wide=True, bad=True)


def _section(title: str, cards: Iterable[str]) -> str:
    inside = "".join(cards)
    return f'<h2>{title}</h2><div class="cards">{inside}</div>' if inside else ""


def _card(title: str, inside: str, *, remark: str = "", wide: bool = False, bad: bool = False) -> str:
    below = f'<p class="dim">{escape(remark)}</p>' if remark else ""
    above = f"<h3>{escape(title)}</h3>" if title else ""
    kinds = "".join((" wide" if wide else "", " alarm" if bad else ""))
    return f'<section class="card{kinds}">{above}{inside}{below}</section>'


def _line(name: str, steps: Sequence[StepFigures], value: Callable[[StepFigures], float | None]) -> Series:
    points = [(float(step.step), found) for step in steps if (found := value(step)) is not None]
    return Series(name=name, points=points)


def _learning(figures: ReportFigures) -> Iterable[str]:
    steps = [step for step in figures.steps if step.is_trained] or figures.steps
    names = sorted({stream for step in steps for stream in step.reward_by_stream})
    lines = [_line(name, steps, lambda step, name=name: step.reward_by_stream.get(name)) for name in names]
    missing = figures.num_manifests_missing
    remark = f"the manifests of {missing} steps are not kept any more: their streams can't be told" if missing else ""
    if len(lines) > 1:
        yield _card("Reward by stream", line_chart(lines, x_name="step", whole_x=True), remark=remark)
    yield _card("Reward", line_chart([_line("all", steps, lambda step: step.reward)], x_name="step", whole_x=True))
    stale = [
        _line("oldest row", steps, lambda step: float(step.staleness_max)),
        _line("mean", steps, lambda step: step.staleness_mean),
    ]
    bound = figures.account.staleness.bound
    if bound is not None and steps:
        ends = [(float(steps[0].step), float(bound)), (float(steps[-1].step), float(bound))]
        stale.append(Series(name="bound", points=ends, dashed=True))
    yield _card("Staleness, in versions", line_chart(stale, x_name="step", y_floor=0.0, whole_x=True))


def _update(figures: ReportFigures) -> Iterable[str]:
    """Losses, mismatch and the other statistics of the updates."""
    steps = [step for step in figures.steps if step.is_trained]
    names = {name for step in steps for name in step.stats if not name.startswith("perf/")}
    mismatch = sorted(name for name in names if name.startswith("mismatch/"))
    if mismatch:
        lines = [
            _line(name.partition("/")[2], steps, lambda step, name=name: step.stats.get(name)) for name in mismatch
        ]
        yield _card("Mismatch of engine and trainer", line_chart(lines, x_name="step", y_floor=0.0, whole_x=True))
    rest = names - set(mismatch)
    ordered = [name for name in _LOSSES if name in rest] + sorted(rest - set(_LOSSES))
    for name in ordered[:_CHARTS_OF_STATS]:
        line = _line(name, steps, lambda step, name=name: step.stats.get(name))
        yield _card(name, line_chart([line], x_name="step", whole_x=True))
    further = ordered[_CHARTS_OF_STATS:]
    if further:
        last = steps[-1].stats
        rows = [(name, short(last[name])) for name in further if name in last]
        yield _card(f"Further statistics of step {steps[-1].step}", _table(("statistic", "value"), rows))
    skipped = [(str(step.step), step.skipped) for step in steps if step.skipped]
    if skipped:
        count = len(skipped)
        remark = f"the last {_SKIPPED_SHOWN} of {count}" if count > _SKIPPED_SHOWN else ""
        yield _card("Steps without an update", _table(("step", "reason"), skipped[-_SKIPPED_SHOWN:]), remark=remark)


def _speed(figures: ReportFigures) -> Iterable[str]:
    rates = figures.rates
    length_s = figures.last_unix_s - figures.first_unix_s
    unit, scale = ("s", 1.0) if length_s < 300 else ("min", 60.0) if length_s < 7200 else ("h", 3600.0)
    lines = [
        Series(name="sampled", points=[(rate.since_start_s / scale, rate.sampled_per_s) for rate in rates]),
        Series(
            name="trained, prompts included",
            points=[(rate.since_start_s / scale, rate.trained_per_s) for rate in rates],
        ),
    ]
    yield _card("Tokens per second", line_chart(lines, x_name=f"{unit} since the start", y_floor=0.0))
    steps = [step for step in figures.steps if step.is_trained]
    trained = {step.step: step.trained_unix_s for step in steps}
    waits = _line(
        "the trainer waited for it",
        steps,
        lambda step: max(0.0, step.assembled_unix_s - trained[step.step - 1]) if step.step - 1 in trained else None,
    )
    times = [_line("training it", steps, lambda step: step.seconds), waits]
    yield _card("Seconds a step", line_chart(times, x_name="step", y_floor=0.0, whole_x=True))
    rows = [
        (hop.name, hop.meaning, f"{hop.count:,}", duration(hop.median_s), duration(hop.p95_s), duration(hop.max_s))
        for hop in figures.hops
    ]
    if rows:
        head = ("from → to", "what it is", "times", "median", "95 %", "longest")
        yield _card("Waits on the way from a request to a trained step", _table(head, rows, numbers=4), wide=True)


def _groups(figures: ReportFigures) -> Iterable[str]:
    account = figures.account
    groups = account.groups
    ends = (
        ("trained", groups.trained),
        ("dropped", groups.dropped),
        ("open", groups.open),
        ("unexplained", account.unexplained),
    )
    text = f"{groups.issued:,} issued = " + " + ".join(f"{count:,} {name}" for name, count in ends)
    yield _card("Account", bars([(name, count, f"{count:,}") for name, count in ends]), remark=text)
    if account.dropped_by_reason:
        yield _card("Dropped groups by reason", _counts(account.dropped_by_reason))
    yield _card("Groups issued by stream", _counts(account.groups_by_stream))
    episodes = account.episodes
    remark = f"{episodes.requested:,} requested, {episodes.ended:,} ended, {episodes.rejected:,} slots rejected"
    yield _card("Episode ends by class", _counts(account.classes), remark=remark)
    if account.classes_by_harness:
        yield _card("Episode ends by stream and harness", _by_harness(account.classes_by_harness), wide=True)
    if figures.rejected_slots:
        yield _card("Rejected slots by reason", _counts(figures.rejected_slots), wide=True)


def _by_harness(found: Sequence[HarnessClasses]) -> str:
    kinds = [kind.value for kind in EpisodeClass]
    rows = [
        (one.stream, one.harness or "not known", *(f"{one.classes.get(kind, 0):,}" for kind in kinds)) for one in found
    ]
    return _table(("stream", "harness", *kinds), rows, numbers=len(kinds))


def _counts(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return bars([(name, count, f"{count:,}") for name, count in ordered]) or '<p class="none">none</p>'


def _faults(figures: ReportFigures) -> Iterable[str]:
    account = figures.account
    if figures.faults:
        rows = [(fault.stage, fault.reason, str(fault.count), fault.example, fault.letter) for fault in figures.faults]
        head = ("stage", "reason", "letters", "the newest one's error", "headrace dead show")
        yield _card("Dead letters", _table(head, rows), wide=True)
    others = [
        (f"{account.unexplained}", f"groups without an end or a reason: {', '.join(account.unexplained_groups)}"),
        (f"{account.doubled}", "groups that ended in more than one way"),
        (f"{account.extra_launches}", "launches repeated, since the answer to one was lost"),
        (f"{max(0, figures.num_starts - 1)}", "times the run was taken up again"),
        (f"{figures.num_unreadable}", "messages that this version can't decode"),
    ]
    found = [row for row in others if row[0] != "0"]
    if found:
        yield _card("Further", _table(("count", "what"), found))
    if figures.controls:
        yield _card("Asked by people", _table(("when and what",), [(line,) for line in figures.controls]))
    if not (figures.troubles or figures.faults or found):
        yield _card("None", '<p class="none">no dead letter, no repeated launch, no unexplained group</p>')


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> str:
    """A table whose last `numbers` columns are numbers."""
    first = len(head) - numbers

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if index >= first else ''} data-name='{escape(head[index])}'>{escape(cell)}</{tag}>"
            for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
