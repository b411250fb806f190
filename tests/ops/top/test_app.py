"""The screen, by keyboard alone."""

import sys
import time

import anyio
import pytest
from waiting import wait_until

from broker.memory import MemoryBroker, MemoryServer
from ops.cli import main
from ops.control import standing
from ops.top.model import Model
from ops.top.watching import watch
from pipeline.metrics import WorkerReport

pytest.importorskip("textual")

from textual.widgets import DataTable, RichLog

from ops.top.app import TopApp
from ops.top.dialogs import FollowScreen, WhyScreen


def report(stage, **fields):
    return WorkerReport(**{"run": "r", "stage": stage, "worker": "h:1", "unix_time_s": time.time(), **fields})


async def pressed(run, size, *, keys=(), then=lambda app: True):
    """Open the screen over a run, press keys, wait until `then` holds; what it said."""
    model = Model("r")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, run.broker, model)
        app = TopApp(run.broker, model)
        async with app.run_test(size=size) as pilot:
            await wait_until(lambda: bool(model.groups) and model.trained_step > 0)
            app.show()
            await pilot.pause()
            await pilot.press(*keys)
            await wait_until(lambda: then(app))
            found = list(app.screen_stack), app.query_one if len(app.screen_stack) == 1 else app.screen.query_one
            rows = found[1](DataTable).row_count if len(found[0]) == 1 else len(found[1](RichLog).lines)
        tasks.cancel_scope.cancel()
    return found[0][-1], rows


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_the_screen_lists_the_groups_at_any_width(small, size):
    _, rows = await pressed(small, size)
    assert rows == 6


async def test_g_explains_the_chosen_group(small):
    screen, rows = await pressed(
        small,
        (80, 24),
        keys=["down", "g"],
        then=lambda app: bool(app.screen.query(RichLog)) and app.screen.query_one(RichLog).lines,
    )
    assert isinstance(screen, WhyScreen)
    assert screen.group == "g0000004"
    assert rows > 5


@pytest.mark.parametrize("key", ["e", "enter"])
async def test_e_and_enter_follow_the_chosen_group(small, key):
    screen, rows = await pressed(
        small,
        (80, 24),
        keys=[key],
        then=lambda app: bool(app.screen.query(RichLog)) and len(app.screen.query_one(RichLog).lines) > 8,
    )
    assert isinstance(screen, FollowScreen)
    assert rows > 8


async def test_escape_goes_back(small):
    screen, _ = await pressed(small, (80, 24), keys=["g", "escape"], then=lambda app: len(app.screen_stack) == 1)
    assert not isinstance(screen, WhyScreen)


@pytest.mark.parametrize(("keys", "word"), [(["d"], "draining"), (["p", "r", "p"], "paused")])
async def test_keys_put_instructions_on_the_log(small, keys, word):
    await pressed(small, (80, 24), keys=keys)
    assert (await standing(small.broker)).word == word


async def test_nothing_is_asked_of_a_run_that_is_over():
    broker = MemoryBroker(MemoryServer(), "r")
    app = TopApp(broker, Model("r", is_running=False))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("p")
    assert (await standing(broker)).word == ""


def test_without_textual_the_error_says_what_to_install(monkeypatch, capsys):
    for name in [
        name
        for name in sys.modules
        if name == "textual" or name.startswith(("textual.", "ops.top.app", "ops.top.dialogs"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(SystemExit):
        main(["top"])
    assert "headrace[top]" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [0, 1, 3])
async def test_everything_fits_on_a_small_screen_without_scrolling(small, wrong):
    model = Model("r", is_running=True)
    told = {"capacity": 0.0, "groups_running": 8.0}
    model.take_report(
        report("sampling", gauges=told, waiting_for="credit, bound by max_staleness: " + "a reason " * 20)
    )
    for stage in ("rewards", "gateway", "weights")[:wrong]:
        model.take_report(report(stage, labels={"weights_error": "a long error " * 20}))
    model.position = 1
    app = TopApp(small.broker, model)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.show()
        await pilot.pause()
        assert not app.screen.show_vertical_scrollbar
        assert app.query_one("#head").size.height == max(2, 1 + wrong)
        assert app.query_one("#engines").size.height <= 3
        assert app.query_one(DataTable).region.bottom <= 23
