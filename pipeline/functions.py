"""A user's own functions, behind import paths `package.module:function`. Knows nothing of what they are for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from schemas.errors import ConfigError


def load_function(setting: str, path: str, expected: str = "a function") -> Callable[..., object]:
    """The function that a setting names.

    Args:
        setting: its name in the config, for errors.
        path: `package.module:function`.
        expected: what it should be, in words.

    Raises:
        ConfigError: it can't be imported, or is no function.
    """
    module_name, _, function_name = path.partition(":")
    try:
        found: object = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{setting}: can't import {path!r}: {error}; expected package.module:function") from error
    if not callable(found):
        raise ConfigError(f"{setting}: {path!r} is a {type(found).__name__}, expected {expected}")
    return found
