"""Whether the user's functions that a config names can be found, without running any of their code.

Workers are started with the folder of the command on their import path; so it is looked at here, too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from schemas.config import EngineKind, EngineSection, GatewaySection
from schemas.config_arena import StreamConfig, StreamRunner
from schemas.errors import ConfigError

_MADE_AT_IMPORT: Final = re.compile(r"import \*|__getattr__|setattr|globals\(")
"""A module with such words may have functions whose names stand nowhere in it."""


def check_imports(
    streams: Sequence[StreamConfig], engine: EngineSection, gateway: GatewaySection, filters: Sequence[str]
) -> None:
    """Refuse a function that is not there.

    Raises:
        ConfigError: the first one.
    """
    named = [
        *((f"streams.{stream.name}.reward_transform", stream.reward_transform) for stream in streams),
        *((f"streams.{stream.name}.agent", stream.agent) for stream in streams if _is_played_here(stream)),
        *((("engine.script", engine.script),) if engine.kind is EngineKind.SCRIPTED else ()),
        *(("gateway.preprocessors", path) for path in gateway.preprocessors),
        *(("assembly.user_filters", path) for path in filters),
    ]
    for key, path in named:
        if reason := _why_missing(path):
            raise ConfigError(
                f"{key}: expected package.module:function that can be imported in {Path.cwd()}, found {path!r}: {reason}"
            )


def _is_played_here(stream: StreamConfig) -> bool:
    """Whether this Python imports its agent."""
    return stream.runner is StreamRunner.FUNCTION and not stream.agent_python


def _why_missing(path: str) -> str:
    """Why it can't be imported; empty where it can, or where only an import would tell."""
    if not path:
        return ""
    module, _, function = path.partition(":")
    spec = _find(module)
    if spec is None:
        return f"there is no module {module!r}"
    if not (spec.origin and spec.origin.endswith(".py")):
        return ""
    source = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    if re.search(rf"\b{re.escape(function)}\b", source) or _MADE_AT_IMPORT.search(source):
        return ""
    return f"{spec.origin} has no {function!r}"


def _find(module: str) -> ModuleSpec | None:
    """The module's place. A name among those that Python brings along is not looked for in folders."""
    if module.partition(".")[0] in sys.builtin_module_names:
        return ModuleSpec(module, None)
    places: Sequence[str] | None = [os.getcwd(), *sys.path]  # noqa: PTH109 - import paths are texts
    spec: ModuleSpec | None = None
    for depth, part in enumerate(module.split(".")):
        if places is None:
            return None
        # Under its last name alone: by its whole name a folder without __init__.py would want its parent imported.
        spec = PathFinder.find_spec(part, places)
        if spec is None and depth == 0:
            spec = find_spec(part)  # where other finders know it, as those of editable installs
        if spec is None:
            return None
        found = spec.submodule_search_locations
        places = None if found is None else list(found)
    return spec
