"""Which groups are closed: their surplus episodes are not waited for. Knows ids only; who follows the log tells it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import anyio

_REMEMBERED: Final = 10_000
"""Closed groups kept in mind; an episode of an older one was delivered long before."""


class ClosedGroups:
    """Tells the episodes of a group when it closes."""

    def __init__(self) -> None:
        self._closed: Final[OrderedDict[str, None]] = OrderedDict()
        self._waiting: Final[dict[str, tuple[anyio.Event, int]]] = {}

    def close(self, group: str) -> None:
        """The group needs no further episode."""
        self._closed[group] = None
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
        waiting = self._waiting.get(group)
        if waiting is not None:
            waiting[0].set()

    def join(self, group: str) -> anyio.Event:
        """An event that is set once the group is closed; give it back with `leave`."""
        event, users = self._waiting.get(group, (anyio.Event(), 0))
        self._waiting[group] = (event, users + 1)
        if group in self._closed:
            event.set()
        return event

    def leave(self, group: str) -> None:
        """One episode of the group needs to know no more."""
        event, users = self._waiting.pop(group)
        if users > 1:
            self._waiting[group] = (event, users - 1)
