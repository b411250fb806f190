"""`headrace why THING`."""

from __future__ import annotations

from typing import Annotated

import anyio
import msgspec
from cyclopts import Parameter

from ops.cli.failing import EXIT_FAILED, plain_errors
from ops.cli.incomplete import tell_soundness
from ops.cli.log_views import print_life
from ops.cli.output import console, write_json
from ops.logtools.lives import Fate, Life
from ops.logtools.names import parse_name
from ops.logtools.soundness import Soundness, soundness
from ops.logtools.sources import open_source
from ops.logtools.why import why as tell_why


def why(
    thing: str,
    /,
    *,
    source: Annotated[str | None, Parameter(name=["--in", "-i"])] = None,
    url: str | None = None,
    json: bool = False,
) -> int:
    """The whole life of a group, an episode, a session, a row or a step: what happened, when, and what it waited for.

    Exit code 1 when the log does not speak of it, 3 when the recording is damaged or messages are missing in it.

    Examples:
        headrace why g12
        headrace why g12/3 --in q.hrrec
        headrace why step:412 --in runs/quickstart --json
        headrace why g0000012-3-0-0

    Parameters
    ----------
    thing
        g12 (a group), g12/3 or g12/3/0 (an episode), g0000012-3-0-0 (a session), g0000012-3-0 (a row), 412 or step:412.
    source
        A recording, or a run's folder or name; the newest run below ./runs when left out. With --url, the run's id.
    url
        Broker of a run whose folder is elsewhere.
    json
        One JSON object.
    """

    async def work() -> tuple[Life, Soundness]:
        async with open_source(source, url=url) as opened:
            life = await tell_why(opened, subject)
            sound = soundness(opened)
            return msgspec.structs.replace(life, damages=sound.damages, gaps=sound.gaps), sound

    with plain_errors():
        subject = parse_name(thing)
        life, sound = anyio.run(work)
    write_json(life) if json else print_life(life, console())
    incomplete = tell_soundness(sound)
    return EXIT_FAILED if life.fate is Fate.UNKNOWN else incomplete
