"""A run's config as others may see it: on the log, at experiment trackers, in reports.

Secrets are named by file or environment variable and don't stand in a config; what does all the same (a password in a URL, a key
in a harness's environment or among an agent's settings) is masked. Of an environment every value is: names of variables tell
nothing reliable about what they hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, cast

import msgspec

from ops.config import RunConfig
from pipeline.logs import MASK, is_secret_name, mask_text

_ENVIRONMENTS: Final = frozenset({"task_envs", "env", "envs", "environ", "environment", "headers"})
"""Maps whose values are masked whatever they are called."""
_FREE: Final = frozenset({"agent_args", "local_arena"})
"""Tables whose keys somebody else named."""
_SECRET_WORDS: Final = re.compile(
    r"(?:^|_)(?:pass|password|passwd|passphrase|pwd|pat|secrets?|token|credentials?|creds|auth|authorization|bearer|cookies?"
    r"|(?:api|access|private|secret|signing|encryption|licen[cs]e|account|auth|ssh|service|storage)_?keys?)(?:_|$)"
)
_NAMES_A_PLACE: Final = re.compile(r"_(?:env|var|file|path|dir|name|url)$")
"""`token_env`, `password_file`: where a secret is, not what it is."""
_FLAG: Final = re.compile(r"--?[\w-]+")


def redacted(config: RunConfig) -> dict[str, Any]:  # Any: JSON
    """The config as JSON values, masked."""
    return cast(dict[str, Any], _masked(msgspec.to_builtins(config), is_free=False))  # cast: a struct becomes a dict


def masked_places(config: RunConfig) -> list[str]:
    """Where the config holds what is masked, as dotted paths."""
    return list(_differences(msgspec.to_builtins(config), redacted(config), ""))


def _differences(plain: object, masked: object, place: str) -> Iterator[str]:
    match plain, masked:
        case dict(), dict():
            before, after = (
                cast(dict[str, object], plain),
                cast(dict[str, object], masked),
            )  # cast: JSON keys are strings
            for key, value in before.items():
                yield from _differences(value, after[key], f"{place}.{key}" if place else key)
        case list(), list():
            pairs = zip(cast(list[object], plain), cast(list[object], masked), strict=True)  # cast: same
            for number, (value, shown) in enumerate(pairs):
                yield from _differences(value, shown, f"{place}[{number}]")
        case _ if plain != masked:
            yield place
        case _:
            pass


def _masked(value: object, *, is_free: bool) -> object:
    match value:
        case dict():
            items = cast(dict[str, object], value).items()  # cast: JSON keys are strings
            return {key: _masked_item(key, one, is_free=is_free or key in _FREE) for key, one in items}
        case list():
            return _masked_list(cast(list[object], value), is_free=is_free)  # cast: same
        case str():
            return mask_text(value)
        case _:
            return value


def _masked_item(key: str, value: object, *, is_free: bool) -> object:
    if key in _ENVIRONMENTS and isinstance(value, dict):
        return _hidden(cast(object, value))
    secret = is_secret_name(key) if not is_free else _is_secret(key)
    if secret and (is_free or isinstance(value, str)):
        return _hidden(value)
    return _masked(value, is_free=is_free)


def _masked_list(items: list[object], *, is_free: bool) -> list[object]:
    """Arguments of a command among them: what follows a flag with a secret's name is its value."""
    told: list[object] = []
    for former, item in zip([None, *items], items, strict=False):
        is_value = isinstance(former, str) and _FLAG.fullmatch(former) and _is_secret(former.lstrip("-"))
        told.append(_hidden(item) if is_value else _masked(item, is_free=is_free))
    return told


def _is_secret(name: str) -> bool:
    """Of a name that somebody else chose, in snake, kebab or camel case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    if _NAMES_A_PLACE.search(words):
        return False
    return is_secret_name(words) or _SECRET_WORDS.search(words) is not None


def _hidden(value: object) -> object:
    """All texts in it masked; an empty one hides nothing."""
    match value:
        case dict():
            return {key: _hidden(one) for key, one in cast(dict[str, object], value).items()}  # cast: JSON keys
        case list():
            return [_hidden(one) for one in cast(list[object], value)]  # cast: same
        case str():
            return MASK if value else value
        case _:
            return value
