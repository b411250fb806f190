"""`headrace arena serve`."""

from __future__ import annotations

import cyclopts

from ops.arena.__main__ import main as arena_main

app = cyclopts.App(name="arena", help="The local Arena.")


@app.command
def serve(config: str = "quickstart", /) -> int:
    """Serve a local Arena on loopback: the whole Arena API, tasks of reasoning-gym, harnesses, planned faults.

    Prints one JSON line with its URL when it is ready. Callers need the keys in ARENA_OPENAPI_TOKEN and ARENA_LLM_API_KEY.

    Examples:
        ARENA_OPENAPI_TOKEN=… ARENA_LLM_API_KEY=… headrace arena serve quickstart

    Parameters
    ----------
    config
        A TOML file, or `quickstart` for the streams of the first run.
    """
    return arena_main([config])
