"""The screen itself: Textual widgets that show a model, and keys. Needs the extra `top`."""

from __future__ import annotations

import time
from typing import ClassVar, Final

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Static

from broker.api import Broker
from broker.errors import BrokerError
from ops.control import ask
from ops.top.dialogs import FollowScreen, WhyScreen
from ops.top.model import GROUPS_KEPT, Model
from ops.top.views import GROUP_COLUMNS, WIDE, engines, group_cells, group_counts, head, rewards, stages
from schemas.messages.sampling import ControlAction

_REFRESH_S: Final = 0.5
_LOW_LINES: Final = 24
"""Height of a narrow screen on which everything fits while at most one thing is wrong."""


class TopApp(App[None]):
    """Shows a model that somebody else keeps up to date."""

    TITLE = "headrace"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 - as App declares it
    CSS = """
    Screen { layout: vertical; overflow: hidden hidden; }
    #head { height: auto; min-height: 2; padding: 0 1; }
    #upper { height: auto; layout: vertical; }
    #side { height: auto; }
    .panel { height: auto; padding: 0 1; border-top: solid $panel; border-title-color: $text-muted; }
    #groups { height: 1fr; min-height: 4; padding: 0 1; border-top: solid $panel; border-title-color: $text-muted; }
    #groups:focus { border-top: solid $accent; }
    .-narrow #engines, .-narrow #rewards, .-narrow #stages { border-top: none; }
    .-wide #upper { layout: horizontal; }
    .-wide #stages { width: 3fr; }
    .-wide #side { width: 2fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "ask('pause')", "pause"),
        Binding("r", "ask('resume')", "resume"),
        Binding("d", "ask('drain')", "drain"),
        Binding("e", "follow", "follow"),
        Binding("g", "why", "explain"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, broker: Broker, model: Model) -> None:
        super().__init__(ansi_color=False)
        self._broker = broker
        self._model = model
        self._listed: list[str] = []

    def compose(self) -> ComposeResult:
        """From top to bottom; side by side where there is room."""
        yield Static(id="head")
        with Horizontal(id="upper"):
            yield Static(id="stages", classes="panel")
            with Vertical(id="side"):
                yield Static(id="engines", classes="panel")
                yield Static(id="rewards", classes="panel")
        table: DataTable[object] = DataTable(id="groups", cursor_type="row", zebra_stripes=False)
        yield table
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to show."""
        table = self._table()
        for name in GROUP_COLUMNS:
            table.add_column(name, key=name)
        table.focus()
        self.show()
        self.set_interval(_REFRESH_S, self.show)

    def on_resize(self) -> None:
        """Draw for the new width."""
        self.call_after_refresh(self.show)

    def show(self) -> None:
        """Draw the model as it is now."""
        if len(self.screen_stack) > 1 or not self.query("#rewards"):  # not here yet, or gone already
            return
        now_s, model, width = time.time(), self._model, self.size.width
        panels = {
            "head": head(model, width - 2, now_s),
            "stages": stages(model, width if width < WIDE else width * 3 // 5, now_s),
            "engines": engines(model, now_s, width),
            "rewards": rewards(model, (width if width < WIDE else width * 2 // 5) - 2),
        }
        # What is wrong takes the place of the rewards where both don't fit above the groups.
        lines = head(model, width - 2, now_s).plain.count("\n")
        has_room = width >= WIDE or self.size.height >= _LOW_LINES + lines - 1
        self.query_one("#rewards").display = has_room
        for name, content in panels.items():
            self.query_one(f"#{name}", Static).update(content)
        self._show_groups(now_s)

    def _table(self) -> DataTable[object]:
        return self.query_one("#groups", DataTable)

    def _show_groups(self, now_s: float) -> None:
        """The newest first; the cursor stays on its group."""
        table = self._table()
        table.border_title = group_counts(self._model)
        wanted = list(reversed(self._model.groups))[:GROUPS_KEPT]
        if wanted != self._listed:
            chosen, at_top = self.chosen(), table.cursor_row == 0
            table.clear()
            for name in wanted:
                table.add_row(*group_cells(self._model.groups[name], now_s), key=name)
            self._listed = wanted
            if not at_top and chosen in wanted:
                table.move_cursor(row=wanted.index(chosen), animate=False)
            return
        for name in wanted:
            for column, cell in zip(GROUP_COLUMNS, group_cells(self._model.groups[name], now_s), strict=True):
                table.update_cell(name, column, cell)

    def chosen(self) -> str:
        """The group under the cursor."""
        row = self._table().cursor_row
        return self._listed[row] if 0 <= row < len(self._listed) else ""

    def on_data_table_row_selected(self) -> None:
        """Enter on a group."""
        self.action_follow()

    async def action_ask(self, name: str) -> None:
        """Put an instruction on the log."""
        if not self._model.is_running:
            self.notify("the run is not running", severity="warning")
            return
        try:
            await ask(self._broker, ControlAction(name), "from headrace top")
        except BrokerError as error:
            self.notify(str(error), severity="error")
        else:
            self.notify(f"asked to {name}; it is on the log", timeout=2)

    def action_follow(self) -> None:
        """Watch the messages of the chosen group's episodes."""
        if len(self.screen_stack) == 1 and self.chosen() in self._model.groups:
            line = self._model.groups[self.chosen()]
            live = self._model.is_running
            self.push_screen(FollowScreen(self._broker, line.group, issued_sequence=line.sequence, live=live))

    def action_why(self) -> None:
        """Tell the chosen group's life."""
        if len(self.screen_stack) == 1 and self.chosen():
            self.push_screen(WhyScreen(self._broker, self.chosen()))
