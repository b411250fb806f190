"""A run's config as others may see it: on the log, at experiment trackers, in reports.

Secrets are named by file or environment variable and don't stand in a config; what does all the same (a password in a URL, a key
in a harness's environment) is masked.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from ops.config import RunConfig
from pipeline.logs import MASK, is_secret_name, mask_text


def redacted(config: RunConfig) -> dict[str, Any]:  # Any: JSON
    """The config as JSON values, masked."""
    return cast(dict[str, Any], _masked(msgspec.to_builtins(config)))  # cast: a struct becomes a dict


def _masked(value: object) -> object:
    match value:
        case dict():
            items = cast(dict[str, object], value).items()  # cast: JSON keys are strings
            return {
                key: MASK if is_secret_name(key) and isinstance(one, str) and one else _masked(one)
                for key, one in items
            }
        case list():
            return [_masked(one) for one in cast(list[object], value)]  # cast: same
        case str():
            return mask_text(value)
        case _:
            return value
