"""What `top` shows over its screen: a group's life, or its episodes' messages as they come."""

from __future__ import annotations

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

_VALUE_CHARS: Final = 60
_IN_THE_KEY: Final = frozenset({"group", "slot", "attempt", "launch_try", "session", "ordinal"})


class _Overlay(ModalScreen[None]):
    """A scrolling text over everything; Escape goes back."""

    CSS = """
    _Overlay { background: $background; }
    RichLog { height: 1fr; padding: 0 1; border-top: solid $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "back", "back", key_display="esc")]

    def __init__(self, broker: Broker, group: str) -> None:
        super().__init__()
        self._broker = broker
        self._group = group

    def compose(self) -> ComposeResult:
        """The text and the keys."""
        yield RichLog(wrap=False, markup=False, auto_scroll=False, max_lines=5000)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin."""
        self._text().border_title = self._group
        self._text().focus()
        self.run_worker(self._fill(), exclusive=True)

    def _text(self) -> RichLog:
        return self.query_one(RichLog)

    async def _fill(self) -> None:
        try:
            await self.fill()
        except (BrokerError, SchemaError) as error:
            self._text().write(Text(str(error), style="red"))

    async def fill(self) -> None:
        """Write the text."""
        raise NotImplementedError

    def action_back(self) -> None:
        """To the screen below."""
        self.dismiss()


class WhyScreen(_Overlay):
    """`headrace why` of a group."""

    async def fill(self) -> None:
        life = await why(LiveSource(self._broker), parse_name(self._group))
        width = max(40, self.size.width - 4)
        drawn = StringIO()
        print_life(
            life, Console(file=drawn, width=width, force_terminal=True, color_system="truecolor", highlight=False)
        )
        self._text().write(Text.from_ansi(drawn.getvalue()))


class FollowScreen(_Overlay):
    """`headrace tap --follow` of a group's episodes, from its issue on."""

    def __init__(self, broker: Broker, group: str, *, issued_sequence: int, live: bool) -> None:
        super().__init__(broker, group)
        self._after = issued_sequence - 1
        self._live = live

    async def fill(self) -> None:
        subject = parse_name(self._group)
        wanted = tuple(follow_filters(self._broker.run, subject))
        about = is_about(subject)
        self._text().auto_scroll = True
        async with self._broker.read(apart(wanted), after_sequence=self._after, follow=self._live) as records:
            async for record in records:
                told = tell(record)
                if any_matches(wanted, record.subject) and about(told):
                    self._text().write(_line(tapped(told)))


def _line(seen: Tapped) -> Text:
    line = Text.assemble((clock(seen.time_s), "cyan"), " ", (seen.topic, "bold"), f" {seen.key}")
    for name, value in seen.fields.items():
        if name not in _IN_THE_KEY and value not in ("", None, [], {}):
            line.append(f"  {name}=", style="dim")
            line.append(" ".join(str(value).split())[:_VALUE_CHARS])
    return line
