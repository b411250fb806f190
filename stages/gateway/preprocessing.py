"""Loads the run's own functions that change a conversation before it is rendered: `gateway.preprocessors`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from pipeline.functions import load_function
from schemas.errors import ConfigError
from stages.gateway.conversation import Call
from stages.gateway.ports import Preprocessor


def load_preprocessors(paths: Sequence[str]) -> tuple[Preprocessor, ...]:
    """The functions behind import paths `package.module:function`, in their order.

    Raises:
        ConfigError: one that can't be imported, or is no plain function of one call.
    """
    return tuple(_load(path) for path in paths)


def _load(path: str) -> Preprocessor:
    found = load_function("gateway.preprocessors", path, "a plain function of a Call")
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"gateway.preprocessors: {path!r} is an async function, expected a plain function of a Call")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise ConfigError(f"gateway.preprocessors: {path!r} can't be called with one Call: {error}") from error

    def preprocess(call: Call) -> Call:
        changed = found(call)
        if not isinstance(changed, Call):
            raise TypeError(f"gateway.preprocessors: {path} returned a {type(changed).__name__}, expected a Call")
        return changed

    return preprocess
