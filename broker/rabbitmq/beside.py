"""Tasks that run beside a context's body, where errors leave as they are: not in a group of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.abc


@asynccontextmanager
async def running_beside() -> AsyncGenerator[anyio.abc.TaskGroup]:
    """A task group that ends with the context.

    Raises:
        Exception: the body's own error, or that of a task, which ends the body.
    """
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            try:
                yield tasks
            except Exception as error:  # noqa: BLE001 - raised below, as it is
                failure = error
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        failure = failure or _only(group)
        if failure is None:
            raise
    if failure is not None:
        raise failure


def _only(group: BaseExceptionGroup) -> Exception | None:
    """The single error in a group."""
    if len(group.exceptions) != 1:
        return None
    inner = group.exceptions[0]
    if isinstance(inner, BaseExceptionGroup):
        return _only(inner)
    return inner if isinstance(inner, Exception) else None
