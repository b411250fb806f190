"""A bound for what is asked of the log: one that is away or slow is a 503 for the client, never a fault of the gateway."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import anyio

from stages.gateway.errors import UnavailableError


@contextmanager
def log_deadline(seconds: float, *refused_by: type[Exception]) -> Generator[None]:
    """Give up after so long; errors of these kinds mean that the log can't be used.

    Raises:
        UnavailableError: either happened.
    """
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError as error:
        raise UnavailableError(f"the log did not answer within {seconds:g} s") from error
    except refused_by as error:
        raise UnavailableError(f"the log can't be used: {error}") from error
