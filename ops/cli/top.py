"""`headrace top [RUN]`."""

from __future__ import annotations

import anyio

from ops.cli.failing import plain_errors
from ops.connection import look_at_run
from ops.top.model import Model
from ops.top.watching import watch
from schemas.errors import ConfigError


def top(run: str | None = None, /, *, url: str | None = None) -> int:
    """A run as it goes, on one screen: stages, engines, groups, staleness, rewards by stream. By keyboard.

    p pauses, r resumes, d drains; the arrows choose a group, e follows its episodes, g explains it; q quits and leaves the run
    alone. Needs the extra `top`.

    Examples:
        headrace top
        headrace top runs/quickstart

    Parameters
    ----------
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    url
        Broker of a run whose folder is elsewhere.
    """
    with plain_errors():
        anyio.run(_top, run, url)
    return 0


async def _top(run: str | None, url: str | None) -> None:
    try:
        from ops.top.app import TopApp  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "textual":
            raise
        raise ConfigError("headrace top needs textual: pip install 'headrace[top]'") from error
    async with look_at_run(run, url=url, name="top") as opened, anyio.create_task_group() as tasks:
        model = Model(opened.broker.run, is_running=opened.is_running)
        tasks.start_soon(watch, opened.broker, model)
        await TopApp(opened.broker, model).run_async(mouse=False)
        tasks.cancel_scope.cancel()
