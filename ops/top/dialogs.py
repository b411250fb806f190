"""What `top` shows over its screen: a group's life, or its episodes' messages as they come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from io import StringIO
from typing import ClassVar, Final

from rich.console import Console
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Footer, RichLog

from broker.api import Broker
from broker.errors import BrokerError
from broker.naming import any_matches
from ops.cli.log_views import print_life
from ops.logtools.names import parse_name
from ops.logtools.plain import clock
from ops.logtools.sources import LiveSource, apart, tell
from ops.logtools.tap import Tapped, follow_filters, is_about, tapped
from ops.logtools.why import why
from schemas.errors import SchemaError

Fill = Callable[[RichLog, int], Awaitable[None]]
"""Writes a text, given its width in columns."""

_VALUE_CHARS: Final = 60
_IN_THE_KEY: Final = frozenset({"group", "slot", "attempt", "launch_try", "session", "ordinal"})


class _Overlay(ModalScreen[None]):
    """A scrolling text over everything, written by a function of it; Escape goes back."""

    CSS = """
    _Overlay { background: $background; }
    RichLog { height: 1fr; padding: 0 1; border-top: solid $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "back", "back", key_display="esc")]

    def __init__(self, group: str, fill: Fill) -> None:
        super().__init__()
        self.group = group
        self._writes = fill

    def compose(self) -> ComposeResult:
        """The text and the keys."""
        yield RichLog(wrap=False, markup=False, auto_scroll=False, max_lines=5000)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin."""
        text = self.query_one(RichLog)
        text.border_title = self.group
        text.focus()
        self.run_worker(self._fill(text), exclusive=True)

    async def _fill(self, text: RichLog) -> None:
        try:
            await self._writes(text, max(40, self.size.width - 4))
        except (BrokerError, SchemaError) as error:
            text.write(Text(str(error), style="red"))

    def action_back(self) -> None:
        """To the screen below."""
        self.dismiss()


class WhyScreen(_Overlay):
    """`headrace why` of a group."""

    def __init__(self, broker: Broker, group: str) -> None:
        async def fill(text: RichLog, width: int) -> None:
            life = await why(LiveSource(broker), parse_name(group))
            drawn = StringIO()
            print_life(
                life, Console(file=drawn, width=width, force_terminal=True, color_system="truecolor", highlight=False)
            )
            text.write(Text.from_ansi(drawn.getvalue()))

        super().__init__(group, fill)


class FollowScreen(_Overlay):
    """`headrace tap --follow` of a group's episodes, from its issue on."""

    def __init__(self, broker: Broker, group: str, *, issued_sequence: int, live: bool) -> None:
        async def fill(text: RichLog, width: int) -> None:
            del width
            subject = parse_name(group)
            wanted = tuple(follow_filters(broker.run, subject))
            about = is_about(subject)
            text.auto_scroll = True
            async with broker.read(apart(wanted), after_sequence=issued_sequence - 1, follow=live) as records:
                async for record in records:
                    told = tell(record)
                    if any_matches(wanted, record.subject) and about(told):
                        text.write(_line(tapped(told)))

        super().__init__(group, fill)


def _line(seen: Tapped) -> Text:
    line = Text.assemble((clock(seen.time_s), "cyan"), " ", (seen.topic, "bold"), f" {seen.key}")
    for name, value in seen.fields.items():
        if name not in _IN_THE_KEY and value not in ("", None, [], {}):
            line.append(f"  {name}=", style="dim")
            line.append(" ".join(str(value).split())[:_VALUE_CHARS])
    return line
