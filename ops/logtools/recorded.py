"""A recording as the ports that stages ask for: sessions, payloads, the run's config. Nothing is published anywhere."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from broker.recording import Recording
from ops.config import RunConfig, apply_override, decode_config
from ops.logtools.facts import GroupFacts
from ops.logtools.inspecting import facts_of
from ops.logtools.sources import tell
from pipeline.errors import DeadlineError
from pipeline.sessions import SessionRecord
from schemas.errors import ConfigError
from schemas.messages.sampling import RunStarted
from schemas.payload import PayloadRef, content_id, run_ref
from schemas.subjects import PREFIX

_GROUPS_KEPT: Final = 64


def recorded_config(recording: Recording, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of the run's first start, with `--set a.b=c` on top.

    Raises:
        ConfigError: the recording has none, or the result can't be used.
    """
    for record in recording.records([f"{PREFIX}.{recording.run}.run.started.>"]):
        started = tell(record).message
        if isinstance(started, RunStarted):
            return config_of(started, overrides)
    raise ConfigError(
        f"{recording.path}: holds no run.started, so the run's config is not known: it was recorded from a later point "
        "or with a filter"
    )


def config_of(started: RunStarted, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a start, with `--set a.b=c` on top.

    Raises:
        ConfigError: it can't be used.
    """
    tree: dict[str, object] = json.loads(started.config_json)
    tree = {name: value for name, value in tree.items() if value is not None}
    for override in overrides:
        apply_override(tree, override)
    return decode_config(_without_nulls(tree))


def _without_nulls(tree: dict[str, object]) -> dict[str, object]:
    """TOML has no null: a field that is None is left to its default, which None always is where it is allowed."""
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }


class RecordedGroups:
    """What the recording says about groups; the latest ones asked for are kept."""

    def __init__(self, recording: Recording) -> None:
        self.recording: Final = recording
        self._kept: Final[OrderedDict[str, GroupFacts]] = OrderedDict()

    def group(self, name: str) -> GroupFacts:
        """Everything about one group."""
        found = self._kept.get(name)
        if found is None:
            found = self._kept[name] = facts_of(self.recording, name)
            if len(self._kept) > _GROUPS_KEPT:
                self._kept.popitem(last=False)
        return found


class RecordedSessions:
    """Whole sessions of a recording, at once or never."""

    def __init__(self, groups: RecordedGroups) -> None:
        self._groups: Final = groups

    async def read_session(self, session: str) -> SessionRecord:
        """The session's end and all its interactions.

        Raises:
            DeadlineError: the recording does not hold all of it.
        """
        facts = self._groups.group(session.partition("-")[0])
        closed = facts.session_closed.get(session)
        if closed is None:
            raise DeadlineError(f"the recording has no session.closed.{session}")
        calls = facts.calls.get(session, {})
        missing = [ordinal for ordinal in range(closed.message.num_interactions) if ordinal not in calls]
        if missing:
            raise DeadlineError(f"the recording has no interaction.recorded.{session}.{missing[0]}")
        return SessionRecord(
            closed=closed.message,
            interactions=[calls[ordinal].message for ordinal in range(closed.message.num_interactions)],
        )


class RecordedPayloads:
    """Payloads of a recording. What a stage puts is only named, never stored."""

    def __init__(self, recording: Recording) -> None:
        self._recording: Final = recording

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        """The reference that the run's store would give."""
        return run_ref(data)

    async def hold(self, data: bytes | memoryview) -> PayloadRef:
        """The same: whether small bytes ride inside a message is no difference."""
        return PayloadRef(store="run", id=content_id(data), size_bytes=len(data))

    async def get(self, ref: PayloadRef) -> memoryview:
        """The bytes of a reference.

        Raises:
            PayloadMissingError, DigestError.
        """
        return self._recording.payload(ref)
