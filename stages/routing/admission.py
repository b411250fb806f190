"""Whether an engine that joins may take requests: only with the current weights. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.messages.engines import EngineAnnouncement, EngineState


def not_admitted(joining: EngineAnnouncement, *, published: int, fleet: Iterable[int]) -> str:
    """Why an engine may not join yet; empty: it may.

    Args:
        published: newest version on the log.
        fleet: versions that the engines confirmed which take requests already.
    """
    if joining.state is not EngineState.SERVING:
        return told(joining)
    newest = max(fleet, default=0)
    if joining.version < newest:
        return f"it joins with version {joining.version} and the others serve {newest}"
    if joining.version < published and joining.refused_version < published:
        return f"it joins with version {joining.version} and {published} is published"
    return ""


def told(announced: EngineAnnouncement) -> str:
    """An engine's state with its reason, in words."""
    return f"{announced.state.value}: {announced.reason}" if announced.reason else announced.state.value
