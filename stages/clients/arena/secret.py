"""Credentials that can't be printed by accident, and texts from which they are taken out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from schemas.errors import ConfigError

MASK = "***"


class Secret:
    """A credential: every way of printing or encoding it gives a mask; `reveal` gives the value to the wire."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value, for a header or a body that goes to who must have it."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({MASK})"

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return format(MASK, spec)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a Secret is never pickled: pass the name of its environment variable instead")


def secret_from(environ: Mapping[str, str], name: str) -> Secret:
    """The credential in an environment variable.

    Raises:
        ConfigError: It is unset or empty.
    """
    value = environ.get(name, "")
    if not value:
        raise ConfigError(f"environment variable {name}: found nothing, expected a credential of the Arena")
    return Secret(value)


def scrubbed(text: str, secrets: Iterable[Secret]) -> str:
    """A foreign text without any of our credentials in it."""
    for secret in sorted(secrets, key=lambda s: -len(s.reveal())):
        if secret:
            text = text.replace(secret.reveal(), MASK)
    return text
