"""The life of our registrations in an Arena's model gateway: registered at first use, renewed while used, removed at the end.

    hold ──▶ register (an answer lost: DELETE of that exact name) ──▶ in use ──▶ last user gone ──▶ DELETE
                     ▲                                                  │ every minute: renew
                     └──────────── the same name again ◀── confirmed 404┘  (a failed probe is advisory)

A registration that another worker shares among its own users is only ever renewed here: removing it is that worker's, its
successor's, or whoever looks for orphans at a start. Clean-up always runs, is bounded in time, and never hides the error it runs after: its own failure is logged and counted.
Names are a function of the run's label, so those of a killed worker are found and removed at the next start.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

import anyio
import msgspec
import structlog

from stages.clients.arena.client import ArenaClient, ModelEndpoint
from stages.clients.arena.errors import ArenaError, ArenaRefusedError
from stages.clients.arena.transport import Sleep
from stages.clients.arena.wire import is_json

SESSION_PREFIX = "stream-areal-session-"
EPISODE_PREFIX = "stream-areal-episode-"
PREFLIGHT_PREFIX = "stream-areal-preflight-"
_PROBES_AT_ONCE = 8
_WARN_EVERY_PROBES = 10
"""A probe that goes on failing is told about once in so many."""
_SUSPICION_S = 0.5
"""Many episodes fail at once when a registration is collected; one probe answers them all."""
_log = structlog.get_logger("headrace.registration")


class RegistrationCounts(msgspec.Struct, kw_only=True):
    """What happened to registrations; grows while the process lives."""

    registered: int = 0
    restored: int = 0
    """Found missing while in use and registered again under the same name."""
    failed_probes: int = 0
    failed_cleanups: int = 0
    orphans_removed: int = 0


class RegistrationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How registrations are kept."""

    run_label: str
    """Stands in each registration's metadata and tells ours from others'."""
    probe_interval_s: float = 60.0
    cleanup_timeout_s: float = 10.0
    """Of each removal."""


class _Entry:
    def __init__(self, name: str, endpoint: ModelEndpoint | None) -> None:
        self.name = name
        self.endpoint = endpoint
        self.users = 0
        self.standing = False
        self.may_stand = False
        self.foreign = False
        """Another worker's: never removed here."""
        self.failed_probes = 0
        self.probed_s = -math.inf
        self.lock = anyio.Lock()


def session_model_name(run_label: str, *, arena_url: str, gateway_url: str, worker: str) -> str:
    """The name under which one worker registers one gateway in one Arena; the same after a restart. Its first half tells the worker."""
    return _worker_prefix(run_label, arena_url, worker) + _digest(run_label, gateway_url, size_bytes=4)


def is_name_of_worker(name: str, run_label: str, *, arena_url: str, worker: str) -> bool:
    """Whether one worker registers under this name, whatever the gateway is."""
    return name.startswith(_worker_prefix(run_label, arena_url, worker))


def episode_model_name(run_label: str, session: str) -> str:
    """The name under which one session's own registration stands."""
    return EPISODE_PREFIX + _digest(run_label, session)


def preflight_model_name(run_label: str, part: str) -> str:
    """The name under which one preflight registers; `part` is its own among all of the run's."""
    return PREFLIGHT_PREFIX + _digest(run_label, part)


class Registrations:
    """Counted registrations of one process in one Arena; open with `open_registrations`."""

    def __init__(self, client: ArenaClient, settings: RegistrationSettings, counts: RegistrationCounts) -> None:
        self._client = client
        self._settings = settings
        self._entries: dict[str, _Entry] = {}
        self.counts = counts

    @property
    def names(self) -> list[str]:
        """Names of ours that stand, or may stand, in the Arena."""
        return [entry.name for entry in self._entries.values() if entry.may_stand and not entry.foreign]

    @asynccontextmanager
    async def hold(self, name: str, endpoint: ModelEndpoint, *, shared: bool) -> AsyncGenerator[str]:
        """Use a registration; it stands when the body starts.

        Args:
            name: Its exact name.
            endpoint: Where its calls go.
            shared: Keep it after the last user, for the next one; `close` removes it.

        Raises:
            ArenaError: It can't be registered; nothing of it is left.
        """
        entry = self._entries.setdefault(name, _Entry(name, endpoint))
        entry.endpoint, entry.foreign = endpoint, False
        entry.users += 1
        try:
            await self._ensure(entry)
            yield name
        finally:
            await self._leave(entry, keep=shared)

    @asynccontextmanager
    async def adopt(self, name: str, endpoint: ModelEndpoint | None, *, shared: bool = False) -> AsyncGenerator[None]:
        """Keep alive what another process registered for a task that still runs.

        Args:
            name: Its exact name.
            endpoint: To register it again should it be missing; None can only renew it.
            shared: Others use it, too. With an endpoint it is ours by now: kept after the last user, as `hold` does. Without one it is
                another worker's, whose successor may be using it: never removed here.
        """
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(name, endpoint)
            entry.standing = entry.may_stand = True
            entry.foreign = shared and endpoint is None
        entry.users += 1
        try:
            await self._probe(entry)
            yield
        finally:
            await self._leave(entry, keep=shared and not entry.foreign)

    async def suspect(self, name: str) -> None:
        """Somebody failed as if this registration were missing: probe it now, unless that was done a moment ago."""
        entry = self._entries.get(name)
        if entry is None or not entry.users or anyio.current_time() - entry.probed_s < _SUSPICION_S:
            return
        await self._probe(entry)

    async def probe(self) -> None:
        """Renew all registrations in use; restore those that are confirmed missing."""
        limiter = anyio.CapacityLimiter(_PROBES_AT_ONCE)

        async def one(entry: _Entry) -> None:
            async with limiter:
                await self._probe(entry)

        async with anyio.create_task_group() as group:
            for entry in list(self._entries.values()):
                if entry.users:
                    group.start_soon(one, entry)

    def inherit(self, name: str) -> None:
        """A name of ours under which a former process may have registered: removed at the end, at the latest."""
        entry = self._entries.setdefault(name, _Entry(name, None))
        entry.may_stand = True

    @property
    def run_label(self) -> str:
        """What stands in their metadata."""
        return self._settings.run_label

    async def remove_orphans(self, names: Iterable[str]) -> set[str]:
        """Remove registrations that carry our label and that nobody here uses; advisory, foreign ones are left alone.

        Returns:
            Those of which nothing of ours stands any more.
        """
        gone: set[str] = set()
        for name in names:
            if name in self._entries:
                continue
            try:
                model = await self._client.get_model(name)
                if model is None:
                    gone.add(name)
                    continue
                metadata = model.get("metadata")
                label = metadata.get("deployment_id") if is_json(metadata) else None
                if label != self._settings.run_label:
                    _log.warning("a registration of another run has our name", name=name, deployment_id=str(label)[:80])
                    gone.add(name)
                    continue
                self.counts.orphans_removed += await self._client.delete_model(name)
                gone.add(name)
            except ArenaError as error:
                self.counts.failed_cleanups += 1
                _log.warning("an orphaned registration could not be removed", name=name, error=str(error))
        return gone

    async def close(self) -> None:
        """Remove everything that stands or may stand."""
        async with anyio.create_task_group() as group:
            for entry in list(self._entries.values()):
                group.start_soon(self._remove, entry)

    async def _leave(self, entry: _Entry, *, keep: bool) -> None:
        entry.users -= 1
        if not entry.users and not keep:
            await self._remove(entry)

    async def _ensure(self, entry: _Entry) -> None:
        async with entry.lock:
            if not entry.standing:
                await self._register(entry)

    async def _register(self, entry: _Entry) -> None:
        """POST; when its answer is lost, or the wait for it cancelled, it may stand: DELETE that exact name."""
        if entry.endpoint is None:
            return
        entry.may_stand, settled = True, False
        try:
            label = self._settings.run_label
            await self._client.register_model(entry.name, entry.endpoint, deployment_id=label)
            entry.standing = settled = True
            self.counts.registered += 1
        except ArenaRefusedError:
            entry.may_stand, settled = False, True
            raise
        finally:
            if not settled:
                await self._delete(entry)

    async def _probe(self, entry: _Entry) -> None:
        entry.probed_s = anyio.current_time()
        try:
            async with entry.lock:
                if entry.may_stand and await self._client.renew_model(entry.name):
                    entry.standing, entry.failed_probes = True, 0
                    return
                entry.standing = False
                restored = entry.endpoint is not None
                await self._register(entry)
                self.counts.restored += restored
                entry.failed_probes = 0
        except ArenaError as error:
            self.counts.failed_probes += 1
            if entry.failed_probes % _WARN_EVERY_PROBES == 0:
                _log.warning("a registration could not be renewed", name=entry.name, error=str(error))
            entry.failed_probes += 1

    async def _remove(self, entry: _Entry) -> None:
        with anyio.CancelScope(shield=True):
            async with entry.lock:
                if entry.users:
                    return
                gone = entry.foreign or not entry.may_stand or await self._delete(entry)
                if gone and not entry.users:  # somebody may have come while it was removed: it is registered again
                    self._entries.pop(entry.name, None)

    async def _delete(self, entry: _Entry) -> bool:
        """DELETE, bounded and shielded; whether it is certainly gone."""
        entry.standing = False
        try:
            with anyio.CancelScope(shield=True), anyio.fail_after(self._settings.cleanup_timeout_s):
                await self._client.delete_model(entry.name)
        except (ArenaError, TimeoutError) as error:
            self.counts.failed_cleanups += 1
            _log.warning(
                "a registration could not be removed", name=entry.name, error=f"{type(error).__name__}: {error}"
            )
            return False
        entry.may_stand = False
        return True


@asynccontextmanager
async def open_registrations(
    client: ArenaClient,
    settings: RegistrationSettings,
    *,
    counts: RegistrationCounts | None = None,
    sleep: Sleep = anyio.sleep,
) -> AsyncGenerator[Registrations]:
    """Registrations that are probed while open and removed at the end, whatever happens."""
    registrations = Registrations(client, settings, counts or RegistrationCounts())
    try:
        async with anyio.create_task_group() as group:

            async def probe_forever() -> None:
                while True:
                    await sleep(settings.probe_interval_s)
                    await registrations.probe()

            group.start_soon(probe_forever)
            yield registrations
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await registrations.close()


def _worker_prefix(run_label: str, arena_url: str, worker: str) -> str:
    return SESSION_PREFIX + _digest(run_label, arena_url, worker, size_bytes=4)


def _digest(*parts: str, size_bytes: int = 8) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=size_bytes).hexdigest()
