"""`headrace pause | resume | drain [RUN]`."""

from __future__ import annotations

from typing import Final

import anyio

from ops.cli.failing import plain_errors
from ops.cli.output import console, write_json
from ops.connection import look_at_run
from ops.control import Standing, ask, standing
from ops.run_folder import RunFolderError
from schemas.messages.sampling import ControlAction

_EFFECTS: Final = {
    "paused": "no new group is issued; groups under way are finished and trained; `headrace resume` goes on",
    "draining": "no new group is issued; groups under way are finished and trained; `headrace resume` or a new start goes on",
    "": "groups are issued as credit allows",
}


def pause(run: str | None = None, /, *, reason: str = "", url: str | None = None, json: bool = False) -> int:
    """Issue no new groups until `headrace resume`, also over restarts. What is under way is finished and trained.

    Examples:
        headrace pause
        headrace pause runs/quickstart --reason 'the Arena is being updated'

    Parameters
    ----------
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    reason
        Stays on the log; `headrace status` shows it.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: what is in force now.
    """
    return _ask(ControlAction.PAUSE, run, reason, url, json=json)


def resume(run: str | None = None, /, *, reason: str = "", url: str | None = None, json: bool = False) -> int:
    """Issue groups again after a pause or a drain.

    Examples:
        headrace resume runs/quickstart

    Parameters
    ----------
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    reason
        Stays on the log.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: what is in force now.
    """
    return _ask(ControlAction.RESUME, run, reason, url, json=json)


def drain(run: str | None = None, /, *, reason: str = "", url: str | None = None, json: bool = False) -> int:
    """Let the run go empty: no new groups until `headrace resume` or the run's next start.

    Examples:
        headrace drain runs/quickstart --reason 'maintenance tonight'

    Parameters
    ----------
    run
        A run's folder, name or topology file; the newest below ./runs when left out. With --url, the run's id.
    reason
        Stays on the log; `headrace status` shows it.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object: what is in force now.
    """
    return _ask(ControlAction.DRAIN, run, reason, url, json=json)


def _ask(action: ControlAction, run: str | None, reason: str, url: str | None, *, json: bool) -> int:
    async def work() -> tuple[str, Standing]:
        async with look_at_run(run, url=url, name=action.value) as opened:
            if not opened.is_running:
                raise RunFolderError(
                    f"run {opened.broker.run!r} is not running: expected one that is, to {action.value} it; start it first"
                )
            await ask(opened.broker, action, reason)
            return opened.broker.run, await standing(opened.broker)

    with plain_errors():
        name, found = anyio.run(work)
    if json:
        write_json({"run": name, "in_force": found.word, "reason": found.reason})
    else:
        console().print(f"run {name} is {found.word or 'going on'}: {_EFFECTS[found.word]}", markup=False)
    return 0
