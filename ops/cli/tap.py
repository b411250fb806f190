"""`headrace tap PATTERN …`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker.api import Broker
from ops.cli.failing import plain_errors
from ops.cli.output import console, run_until_interrupt, write_json
from ops.connection import look_at_run
from ops.logtools.expressions import Expression, field_names
from ops.logtools.names import parse_name
from ops.logtools.patterns import parse_pattern
from ops.logtools.plain import clock, size
from ops.logtools.tap import (
    LeftOut,
    Rates,
    Tapped,
    TapSettings,
    check_fields,
    chosen,
    follow_filters,
    is_about,
    rates,
)
from ops.logtools.tap import (
    tap as tap_log,
)
from ops.run_folder import RunFolderError
from schemas.errors import ConfigError
from schemas.topics import TOPICS


def tap(
    *pattern: str,
    run: str | None = None,
    where: str | None = None,
    fields: str | None = None,
    rate: bool = False,
    follow: str | None = None,
    per_second: int = 50,
    limit: int | None = None,
    from_start: bool = False,
    url: str | None = None,
    json: bool = False,
) -> int:
    """Watch what is said on a run's log, live and decoded. Takes no message from anybody, delays none.

    When more is said than may be shown, the rest is passed over and counted.

    Examples:
        headrace tap episode.ended
        headrace tap episode.ended --where 'score < 0.5 and stream == "math"' --fields group,slot,score,error
        headrace tap '>' --rate
        headrace tap --follow g12/3
        headrace tap step --from-start

    Parameters
    ----------
    pattern
        Topics and keys: `episode` (all topics of episodes), `episode.ended`, `episode.ended.g0000012.>`, `>` (everything).
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    where
        Only messages that satisfy it: fields, constants, comparisons, + - * / %, and, or, not, in, len(), contains().
    fields
        Show only these, separated by commas; `a.b` reaches into a field.
    rate
        Show messages and bytes a second by topic instead.
    follow
        Everything about one group or episode; with a pattern only what matches it, too.
    per_second
        Messages shown a second.
    limit
        End after so many messages.
    from_start
        Begin with the log's first message; nothing that stands is passed over. All there is of a run that is over.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object a message.
    """
    with plain_errors():
        if not pattern and follow is None:
            raise ConfigError("tap: expected a pattern such as episode.ended, or --follow EPISODE; '>' is everything")
        if rate and follow is not None:
            raise ConfigError("tap: --rate counts topics and --follow shows messages: expected one of them")
        if per_second < 1:
            raise ConfigError(f"--per-second: expected at least 1, found {per_second}")
        if limit is not None and limit < 1:
            raise ConfigError(f"--limit: expected at least 1, found {limit}")
        run_until_interrupt(
            lambda: _tap(pattern, run, where, fields, rate, follow, per_second, limit, from_start, url, json)
        )
    return 0


async def _tap(
    patterns: tuple[str, ...],
    run: str | None,
    where: str | None,
    fields: str | None,
    rate: bool,
    follow: str | None,
    per_second: int,
    limit: int | None,
    from_start: bool,
    url: str | None,
    json: bool,
) -> None:
    async with look_at_run(run, url=url, name="tap") as opened:
        broker = opened.broker
        parsed = [parse_pattern(text, broker.run) for text in patterns]
        filters = [found.filter for found in parsed]
        topics = {name for found in parsed for name in found.topics}
        only = None
        if follow is not None:
            subject = parse_name(follow)
            own = follow_filters(broker.run, subject)
            only = is_about(subject)
            if not parsed:
                filters, topics = own, {topic.name for topic in TOPICS}
        known = field_names([topic.message for topic in TOPICS if topic.name in topics])
        paths = [path.strip() for path in fields.split(",")] if fields else []
        check_fields(paths, known)
        expression = Expression(where, known) if where is not None else None
        if not opened.is_running and (rate or not from_start):
            raise RunFolderError(
                f"run {broker.run!r} is not running, so nothing new comes; `headrace tap … --from-start` shows what its log holds"
            )
        if rate:
            await _show_rates(broker, filters, json=json)
            return
        settings = TapSettings(per_second=per_second, limit=limit, from_start=from_start, follow=opened.is_running)
        screen = console()
        async for seen in tap_log(broker, filters, settings, where=expression, only=only):
            _show(seen, paths, screen, json=json)


def _show(seen: Tapped | LeftOut, paths: list[str], screen: Console, *, json: bool) -> None:
    match seen:
        case LeftOut():
            if json:
                write_json({"left_out": seen.num_messages, "after_sequence": seen.after_sequence})
            else:
                text = f"… {seen.num_messages:,} messages of the log passed over (--per-second shows more)"
                screen.print(Text(text, style="dim"))
        case Tapped():
            if json:
                write_json(chosen(seen, paths) if paths else seen)
                return
            shown = (
                chosen(seen, paths) if paths else {k: v for k, v in seen.fields.items() if v not in ("", None, [], {})}
            )
            line = Text.assemble(
                (clock(seen.time_s), "cyan"), (f" {seen.sequence} ", "dim"), (seen.topic, "bold"), (f" {seen.key}", "")
            )
            for name, value in shown.items():
                line.append(f"  {name}=", style="dim")
                line.append(_short(value))
            screen.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())[:120]


async def _show_rates(broker: Broker, filters: list[str], *, json: bool) -> None:
    screen = console()
    async for found in rates(broker, filters):
        if json:
            write_json(found)
        else:
            screen.print(_rate_table(found))


def _rate_table(found: Rates) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("topic", min_width=22)
    table.add_column("messages/s", justify="right", min_width=11)
    table.add_column("bytes/s", justify="right", min_width=10)
    for topic, count in found.messages.items():
        table.add_row(topic, f"{count:,.1f}", size(found.size_bytes[topic]))
    total = sum(found.messages.values())
    table.add_row("all", f"{total:,.1f}", size(sum(found.size_bytes.values())), style="bold")
    return table
