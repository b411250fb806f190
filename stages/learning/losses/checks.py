"""Validation of settings, in the words of their field. Knows no loss."""

from typing import get_args

from stages.learning.losses.errors import LossConfigError


def choice(value: str | None, allowed: object, field: str) -> None:
    """Refuse a value that a `Literal` alias doesn't list."""
    names = get_args(allowed)
    if value not in names:
        raise LossConfigError(f"{field} is {value!r}, expected one of {', '.join(map(repr, names))}")


def above(value: float | None, bound: float, field: str) -> None:
    """Refuse a given value that is not above the bound (NaN included)."""
    if value is not None and not value > bound:
        raise LossConfigError(f"{field} is {value}, expected a number > {bound:g}")


def at_least(value: float | None, bound: float, field: str) -> None:
    """Refuse a given value below the bound (NaN included)."""
    if value is not None and not value >= bound:
        raise LossConfigError(f"{field} is {value}, expected a number >= {bound:g}")
