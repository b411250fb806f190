"""How lives, conversations, summaries and differences look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ops.logtools.differences import DifferenceKind, DiffReport
from ops.logtools.inspecting import Call, Conversation, Summary
from ops.logtools.lives import Event, Fate, Life
from ops.logtools.plain import Plain, clock, duration, size
from ops.logtools.spoken import Spoken, spoken

_STYLES: Final = {
    Fate.TRAINED: "green",
    Fate.EVALUATED: "green",
    Fate.OPEN: "yellow",
    Fate.UNKNOWN: "yellow",
    Fate.DROPPED: "magenta",
    Fate.LATE: "magenta",
    Fate.REJECTED: "red",
    Fate.DEAD: "bold red",
}
_NARROW: Final = 100
_SHORTEST_WAIT_S: Final = 0.0005
_TOKENS_SHOWN: Final = 48


def print_life(life: Life, console: Console) -> None:
    """A life: its verdict, then what happened, then what is open."""
    console.print(Text.assemble((life.name, "bold"), "  ", (life.fate.value, _STYLES[life.fate]), f"  {life.verdict}"))
    if life.waits_for:
        console.print(Text.assemble(("waits for ", "yellow"), life.waits_for))
    for problem in life.problems:
        console.print(Text(f"! {problem}", style="red"))
    if life.events:
        console.print()
        console.print(_events(life.events, narrow=console.width < _NARROW))


def _events(events: Sequence[Event], *, narrow: bool) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=not narrow, header_style="dim", expand=False)
    table.add_column("time (UTC)", no_wrap=True, style="cyan")
    table.add_column("waited", no_wrap=True, justify="right", style="dim")
    if not narrow:
        table.add_column("who", no_wrap=True, style="dim")
    table.add_column("what", no_wrap=not narrow, ratio=None)
    if not narrow:
        table.add_column("detail", overflow="fold", ratio=1)
        table.add_column("waited for", overflow="fold", style="dim")
    for event in events:
        waited = duration(event.waited_s) if event.waited_s is not None and event.waited_s >= _SHORTEST_WAIT_S else ""
        if narrow:
            lines = Text.assemble((event.what, "bold"), ("  " + event.who if event.who else "", "dim"))
            if event.detail:
                lines.append(f"\n{event.detail}")
            if waited and event.waited_for:
                lines.append(f"\nwaited for {event.waited_for}", style="dim")
            table.add_row(clock(event.time_s), waited, lines)
        else:
            what = Text(event.what, style="bold")
            table.add_row(
                clock(event.time_s), waited, event.who, what, event.detail, event.waited_for if waited else ""
            )
    return table


def print_summary(found: Summary, console: Console) -> None:
    """What a recording holds."""
    ratio = found.raw_bytes / found.size_bytes if found.size_bytes else 0.0
    console.print(Text.assemble((found.path, "bold"), f"  run {found.run}, schemas {found.schema_version}, "
                                f"by headrace {found.headrace_version}"))  # fmt: skip
    console.print(
        f"{found.messages:,} messages, sequences {found.first_sequence:,} to {found.last_sequence:,}, "
        f"{found.recorded_from} to {found.recorded_to}"
    )
    console.print(
        f"{found.payloads:,} payloads, {size(found.size_bytes)} in {found.files} file{'s' * (found.files != 1)}, "
        f"messages {size(found.raw_bytes)} ({ratio:.1f} : 1)"
        + (f", steps {found.steps[0]} to {found.steps[-1]}" if found.steps else ", no steps")
    )
    if found.redactions:
        console.print(f"redacted: {', '.join(found.redactions)}")
    if found.missing_payloads:
        console.print(f"[yellow]{found.missing_payloads} payloads were gone before they could be recorded[/]")
    if not found.verified:
        console.print("only its index was read; --verify reads every block", style="dim")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("topic")
    table.add_column("messages", justify="right")
    table.add_column("bytes", justify="right")
    for name, topic in found.topics.items():
        table.add_row(name, f"{topic.messages:,}", size(topic.size_bytes))
    console.print()
    console.print(table)


def print_conversation(found: Conversation, console: Console, *, tokens: bool) -> None:
    """An episode as a conversation."""
    head = f"stream {found.stream or '?'}, row {found.data_id or '?'}"
    if found.rejected:
        head += f", rejected: {found.rejected}"
    elif found.reward is not None:
        head += f", reward {found.reward:g}"
    console.print(Text.assemble((f"{found.group}/{found.slot}", "bold"), f"  {head}"))
    if found.prompt is not None:
        console.print(Padding(Text(_text(found.prompt)), (0, 0, 0, 2)))
    for attempt in found.attempts:
        score = "" if attempt.score is None else f", score {attempt.score:g}"
        error = f", {attempt.error}" if attempt.error else ""
        console.print(
            Text.assemble((f"attempt {attempt.attempt}", "bold"), f"  {attempt.outcome} {attempt.status}{score}{error}")
        )
        for call in attempt.calls:
            console.print(Padding(_call(call, tokens=tokens), (0, 0, 0, 2)))


def _call(call: Call, *, tokens: bool) -> RenderableType:
    versions = ", ".join(str(version) for version in call.versions) or "?"
    facts = (
        f"{call.num_context + call.num_prompt} tokens in ({call.num_prompt} new), {call.num_completion} out, "
        f"version {versions}, {call.finish_reason}"
    )
    if call.logprobs:
        facts += f", mean log-prob {sum(call.logprobs) / len(call.logprobs):.3f}"
    if not call.trainable:
        facts += f", not trained ({call.untrainable_reason})"
    parts: list[RenderableType] = [Text.assemble((f"call {call.ordinal}", "cyan"), (f"  {facts}", "dim"))]
    if call.problem:
        parts.append(Text(f"its tokens can't be read: {call.problem}", style="red"))
    parts += [_message(message) for message in spoken(call.messages)]
    if tokens:
        parts.append(_token_table(call))
    return Group(*parts)


def _message(message: Spoken) -> RenderableType:
    text = Text()
    if message.role:
        text.append(f"{message.role}: ", style="green" if message.role == "assistant" else "yellow")
    if message.reasoning:
        text.append(f"({message.reasoning}) ", style="dim italic")
    text.append(message.text)
    for call in message.calls:
        text.append(f"\n→ {call}", style="cyan")
    if message.extra:
        text.append(f"\n{message.extra}", style="dim")
    return Padding(text, (0, 0, 0, 2))


def _token_table(call: Call) -> RenderableType:
    prompt = " ".join(str(token) for token in call.prompt_ids[:_TOKENS_SHOWN])
    more = len(call.prompt_ids) - _TOKENS_SHOWN
    pairs = Text(
        f"new prompt ids: {prompt}{f' … {more} more' if more > 0 else ''}\nsampled id(log-prob): ", style="dim"
    )
    for token, logprob in zip(call.completion_ids, call.logprobs, strict=False):
        style = "red" if logprob < -3 else "yellow" if logprob < -1 else "green"
        pairs.append(f"{token}({logprob:.2f}) ", style=style)
    return Padding(pairs, (0, 0, 0, 2))


def _text(value: Plain) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def print_report(report: DiffReport, console: Console, *, limit: int) -> None:
    """Differences of a stage."""
    style = "green" if not report.differences else "red"
    console.print(
        Text.assemble(
            (f"{report.stage}: ", "bold"),
            f"{report.compared:,} outputs compared, ",
            (f"{report.differences:,} differ", style),
        )
    )
    for difference in report.changed[:limit]:
        console.print(
            Text.assemble(
                (difference.kind.value, "red" if difference.kind is DifferenceKind.FAILED else "yellow"),
                f"  {difference.topic} {difference.key}",
                f"  {difference.reason}" if difference.reason else "",
            )
        )
        for field in difference.fields[:8]:
            console.print(f"    {field.path}: {_text(field.recorded)} → {_text(field.now)}", markup=False)
        if len(difference.fields) > 8:
            console.print(f"    … {len(difference.fields) - 8} more fields")
    if report.differences > limit:
        console.print(f"… {report.differences - limit:,} more; --limit shows them")
    if report.nothing:
        console.print(Text(f"nothing was compared: {report.nothing}", style="red"))
    for line in report.unfinished:
        console.print(Text(f"unfinished: {line}", style="dim"))
