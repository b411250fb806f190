"""The engine's end of weight broadcast: fetch, check, load, say so.

    weights.published ──▶ newest wanted ──▶ files here? else from the store ──▶ check ──▶ engine ──▶ weights.loaded

Files are compared with the published manifest before the engine is touched; a failed load leaves the old version
serving, is told, and the next version is tried as if nothing had been.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from pipeline.errors import PayloadGoneError
from pipeline.metrics import Metrics
from schemas.errors import DigestError
from schemas.messages.training import WeightsLoaded, WeightsManifest, WeightsPublished
from stages.ports import EngineUnavailableError, InferenceEngine, Payloads, SwapMode, WeightsRefusedError
from stages.weight_files.safetensors_file import FILE_NAME, check_against, read_manifest

log = structlog.get_logger("headrace.weights")


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
    ) -> None:
        self._engine: Final = engine
        self._payloads: Final = payloads
        self._cache_dir: Final = Path(cache_dir)
        self._mode: Final = mode
        self._incarnation: Final = incarnation
        self._say: Final = say
        self._metrics: Final = metrics
        self._loaded: WeightsPublished | None = None
        self._wanted: WeightsPublished | None = None
        self._news: anyio.Event = anyio.Event()

    def offer(self, published: WeightsPublished) -> None:
        """A version was published; only the newest one is ever loaded."""
        if self._wanted is None or supersedes(published, self._wanted):
            self._wanted = published
            self._news.set()

    async def run(self) -> None:
        """Load what is offered, for ever."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            wanted = self._wanted
            if wanted is not None:
                await self.load(wanted)

    async def load(self, published: WeightsPublished) -> bool:
        """Bring the engine to a version; whether it serves it now."""
        if self._loaded is not None and not supersedes(published, self._loaded):
            return True
        started = time.perf_counter()
        try:
            folder = await self._fetch(published)
            former = self._loaded
            if former is None or (former.digest, former.version) != (published.digest, published.version):
                await self._engine.load_weights(folder, published.version, self._mode)
        except (WeightsRefusedError, EngineUnavailableError, PayloadGoneError, DigestError) as error:
            self._metrics.labels["weights_error"] = str(error)[:300]
            log.error("weights were not loaded; the old version serves on", version=published.version, error=str(error))  # noqa: TRY400
            return False
        self._loaded = published
        self._metrics.labels.pop("weights_error", None)
        self._metrics.gauges["version"] = published.version
        seconds = time.perf_counter() - started
        await self._say(
            WeightsLoaded(
                engine=self._engine.name,
                incarnation=self._incarnation,
                version=published.version,
                generation=published.generation,
                seconds=round(seconds, 6),
            )
        )
        return True

    async def _fetch(self, published: WeightsPublished) -> str:
        """A folder here whose file is what was published.

        Raises:
            WeightsRefusedError: neither the shared folder nor the store has it whole.
        """
        expected = msgspec.msgpack.decode(await self._payloads.get(published.manifest), type=WeightsManifest)
        if published.directory and (Path(published.directory) / FILE_NAME).exists():
            await anyio.to_thread.run_sync(_check_folder, published.directory, expected)
            return published.directory
        if published.file is None:
            raise WeightsRefusedError(
                f"version {published.version}: {published.directory or 'no folder'} is not on this node "
                "and the payload store does not hold it"
            )
        data = await self._payloads.get(published.file)
        folder = self._cache_dir / f"v{published.version:07d}-g{published.generation}"
        await anyio.to_thread.run_sync(_write_folder, folder, data)
        await anyio.to_thread.run_sync(_check_folder, str(folder), expected)
        return str(folder)


def supersedes(new: WeightsPublished, old: WeightsPublished) -> bool:
    """Whether `new` must be loaded where `old` is: a later version, or the same one by a later trainer."""
    return (new.version, new.generation) > (old.version, old.generation)


def _check_folder(folder: str, expected: WeightsManifest) -> None:
    check_against(read_manifest(Path(folder) / FILE_NAME), expected, folder)


def _write_folder(folder: Path, data: memoryview) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (FILE_NAME + ".part")
    part.write_bytes(data)
    part.replace(folder / FILE_NAME)
