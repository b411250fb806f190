"""The engine's end of weight broadcast: fetch, check, load, probe, say so.

    weights.published ──▶ newest wanted ──▶ shared folder? else the node's cache ──▶ check ──▶ engine ──▶ probe ──▶ weights.loaded
                              ▲                                                        │          │          │
                              └──────────── tried again, or the next version ◀─────────┴──────────┴── fails ─┘

Files are compared with the published manifest before the engine is touched. What is refused leaves the old version
serving; an engine that fails while it loads, or doesn't answer afterwards, is quarantined until a load succeeds.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from pipeline.errors import PayloadGoneError
from pipeline.generations import Generations
from pipeline.metrics import Metrics
from schemas.errors import DigestError
from schemas.messages.engines import EngineState
from schemas.messages.training import (
    Part,
    PartedFile,
    WeightParts,
    WeightsLoaded,
    WeightsManifest,
    WeightsPublished,
)
from stages.ports import (
    EngineUnavailableError,
    InferenceEngine,
    Payloads,
    SwapMode,
    TakesAdapters,
    WeightsRefusedError,
)
from stages.weight_files.holds import announce_reading, end_reading
from stages.weight_files.safetensors_file import check_against, read_folder
from stages.weights.node_cache import NodeCache
from stages.weights.probe import ProbeError, probe

log = structlog.get_logger("headrace.weights")

READING_LABEL: Final = "weights_reading"
"""The label under which a report tells that its engine fetches a version from the store: `version-generation`."""
ERROR_LABEL: Final = "weights_error"
STATE_LABEL: Final = "engine_state"
"""The label under which a report tells why its engine is quarantined."""


class ReceiverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient a receiver is."""

    probe_deadline_s: float = 30.0
    retry_s: float = 1.0
    """Before a version that could not be loaded is tried again; doubled each time."""
    max_retry_s: float = 60.0


def nobody_told(state: EngineState, reason: str) -> None:
    """Nobody asks how the engine is."""


class Receiver:
    """Keeps one engine at the newest published version."""

    def __init__(
        self,
        engine: InferenceEngine,
        payloads: Payloads,
        *,
        cache_dir: str,
        mode: SwapMode,
        incarnation: str,
        say: Callable[[WeightsLoaded], Awaitable[object]],
        metrics: Metrics,
        settings: ReceiverSettings | None = None,
        on_state: Callable[[EngineState, str], None] = nobody_told,
        turn: anyio.Lock | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        cache_dir: a folder on this node's own disk, the same for all its engines.
        on_state: told whenever the engine is quarantined (with the reason) or serves again.
        turn: held while the engine is touched; whoever pauses the engine for the trainer takes it first.
        now: Unix time, for announcements to whoever deletes old versions.
        """
        self._engine: Final = engine
        self._payloads: Final = payloads
        self._cache: Final = NodeCache(cache_dir, payloads)
        self._mode: Final = mode
        self._incarnation: Final = incarnation
        self._reader: Final = re.sub(r"[^A-Za-z0-9_-]", "-", f"{engine.name}-{incarnation}")
        self._say: Final = say
        self._metrics: Final = metrics
        self._settings: Final = settings or ReceiverSettings()
        self._on_state: Final = on_state
        self._turn: Final = turn or anyio.Lock()
        self._now: Final = now
        self._loaded: WeightsPublished | None = None
        self._wanted: WeightsPublished | None = None
        self._generations: Final = Generations()
        self._news: anyio.Event = anyio.Event()
        self.state: EngineState = EngineState.SERVING
        """SERVING (the version that was loaded last) or QUARANTINED."""
        self.refused_version = -1
        """The newest version that could not be loaded; -1: none. Routers let an engine join that tried it."""
        self.loaded: Final = anyio.Event()
        """Set once any version was loaded."""

    def offer(self, published: WeightsPublished) -> None:
        """A version was published, in the order of the log; only the newest one is ever loaded, and none of a trainer that was
        superseded before it came.
        """
        if not self._generations.admits(published.generation):
            log.warning(
                "weights of a superseded trainer are passed over",
                version=published.version,
                generation=published.generation,
                newest_generation=self._generations.newest,
            )
            return
        if self._wanted is None or supersedes(published, self._wanted):
            self._wanted = published
            self._news.set()

    @property
    def wanted(self) -> WeightsPublished | None:
        """The newest version that was offered."""
        return self._wanted

    async def run(self) -> None:
        """Load what is offered, for ever; what fails is tried again until something newer comes."""
        retry_s: float | None = None
        while True:
            with anyio.move_on_after(retry_s):  # None: as long as it takes
                await self._news.wait()
            if self._news.is_set():
                self._news = anyio.Event()
                retry_s = None
            wanted = self._wanted
            if wanted is None or await self.load(wanted):
                retry_s = None
            else:
                retry_s = min(self._settings.max_retry_s, self._settings.retry_s if retry_s is None else 2 * retry_s)

    async def load(self, published: WeightsPublished) -> bool:
        """Bring the engine to a version; whether it serves it now."""
        if self._serves(published):
            return True
        started = time.perf_counter()
        try:
            async with self._folder(published) as folder:
                fetched = time.perf_counter()
                await self._put_in(folder, published)
        except (WeightsRefusedError, PayloadGoneError, DigestError) as error:
            self._tell_error(published, error)
            return False
        except (EngineUnavailableError, ProbeError) as error:
            self._tell_error(published, error)
            self._set_state(EngineState.QUARANTINED, f"version {published.version}: {error}")
            return False
        self._loaded = published
        self.loaded.set()
        self._metrics.labels.pop(ERROR_LABEL, None)
        self._set_state(EngineState.SERVING, "")
        now = time.perf_counter()
        self._metrics.gauges.update(
            version=published.version, weights_fetch_s=fetched - started, weights_load_s=now - fetched
        )
        await self._say(
            WeightsLoaded(
                engine=self._engine.name,
                incarnation=self._incarnation,
                version=published.version,
                generation=published.generation,
                seconds=round(now - started, 6),
            )
        )
        return True

    def _serves(self, published: WeightsPublished) -> bool:
        return (
            self._loaded is not None and self.state is EngineState.SERVING and not supersedes(published, self._loaded)
        )

    async def _put_in(self, folder: str, published: WeightsPublished) -> None:
        former = self._loaded
        same = former is not None and (former.digest, former.version) == (published.digest, published.version)
        if same and self.state is EngineState.SERVING:
            return
        async with self._turn:
            await self._swap(folder, published)
            await probe(self._engine, published.version, deadline_s=self._settings.probe_deadline_s)

    async def _swap(self, folder: str, published: WeightsPublished) -> None:
        if not published.adapter:
            await self._engine.load_weights(folder, published.version, self._mode)
        elif isinstance(self._engine, TakesAdapters):
            await self._engine.load_adapter(folder, published.version, self._mode)
        else:
            raise WeightsRefusedError(
                f"version {published.version} is a LoRA adapter and engine {self._engine.name} takes whole weights only: "
                'set training.lora.publish = "merged"'
            )

    def _tell_error(self, published: WeightsPublished, error: Exception) -> None:
        self.refused_version = max(self.refused_version, published.version)
        self._metrics.labels[ERROR_LABEL] = f"version {published.version}: {error}"[:300]
        log.error("weights were not loaded", version=published.version, error=str(error))

    def _set_state(self, state: EngineState, reason: str) -> None:
        if state is EngineState.QUARANTINED:
            self._metrics.labels[STATE_LABEL] = reason[:300]
            log.error("the engine is quarantined until weights are loaded", engine=self._engine.name, reason=reason)
        else:
            self._metrics.labels.pop(STATE_LABEL, None)
        self.state = state
        self._on_state(state, reason)

    @asynccontextmanager
    async def _folder(self, published: WeightsPublished) -> AsyncGenerator[str]:
        """A folder on this node that is what was published, and stays while the block runs.

        Raises:
            WeightsRefusedError: neither the shared folder nor the store has it whole.
            PayloadGoneError, DigestError: the store has it no more, or damaged.
        """
        expected = msgspec.msgpack.decode(await self._payloads.get(published.manifest), type=WeightsManifest)
        weights_dir = str(Path(published.directory).parent)
        version, generation = published.version, published.generation
        if published.directory and await anyio.to_thread.run_sync(
            lambda: announce_reading(weights_dir, self._reader, version, generation, now=self._now)
        ):
            try:
                await anyio.to_thread.run_sync(_check_folder, published.directory, expected)
                yield published.directory
            finally:
                end_reading(weights_dir, self._reader)
            return
        parts = await self._parts(published, expected)
        self._metrics.labels[READING_LABEL] = f"{version}-{generation}"
        try:
            async with self._cache.folder(version, generation, parts) as folder:
                self._metrics.gauges["weights_fetched_bytes"] = self._cache.last.fetched_bytes
                try:
                    await anyio.to_thread.run_sync(_check_folder, folder, expected)
                except WeightsRefusedError:
                    self._cache.forget(version, generation)
                    raise
                yield folder
        finally:
            del self._metrics.labels[READING_LABEL]

    async def _parts(self, published: WeightsPublished, expected: WeightsManifest) -> WeightParts:
        if published.parts is not None:
            return msgspec.msgpack.decode(await self._payloads.get(published.parts), type=WeightParts)
        if published.file is not None:  # by an earlier version of headrace
            size_bytes = published.file.size_bytes
            return WeightParts(files=[PartedFile(expected.file, size_bytes, [Part(0, size_bytes, published.file.id)])])
        raise WeightsRefusedError(
            f"version {published.version}: {published.directory or 'no folder'} is not on this node and the payload "
            "store does not hold it: share the folder, or set training.weights_through_store"
        )


def not_superseded(published: Iterable[WeightsPublished]) -> list[WeightsPublished]:
    """Without what a trainer said after a later one had spoken; `published` in the order of the log."""
    generations = Generations()
    return [one for one in published if generations.admits(one.generation)]


def supersedes(new: WeightsPublished, old: WeightsPublished) -> bool:
    """Whether `new` must be loaded where `old` is: a later version, or the same one by a later trainer."""
    return (new.version, new.generation) > (old.version, old.generation)


def _check_folder(folder: str, expected: WeightsManifest) -> None:
    check_against(read_folder(folder), expected, folder)
