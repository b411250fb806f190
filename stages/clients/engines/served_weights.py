"""The weights that a server serves: what fits it, how they are swapped, and what is done when a swap fails.

    headers fit? ─▶ hold ─▶ swap ─▶ resume
                             └─ fails ─▶ former weights again ─▶ they answer: refused, the old version serves on
                                                              └─ they don't: the engine is shut until a load succeeds

A server loads what it is given; what doesn't fit leaves it half loaded, healthy by its own word, or dead. So headers are
compared before it is touched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import anyio
import anyio.to_thread
import structlog

from stages.clients.engines.dialect import Dialect
from stages.clients.engines.http import Server
from stages.clients.engines.settings import HttpEngineSettings
from stages.ports import EngineError, EngineUnavailableError, SwapMode, WeightsRefusedError
from stages.weight_files.layout import TensorShape, check_layout, read_layout

log = structlog.get_logger("headrace.engines")

_PROBE_DEADLINE_S: Final = 30.0


class ServedWeights:
    """One server's weights."""

    def __init__(
        self,
        name: str,
        server: Server,
        dialect: Dialect,
        settings: HttpEngineSettings,
        model_folder: str,
        *,
        probe: Callable[[int], Awaitable[None]],
    ) -> None:
        """Args:
        model_folder: what the server was started with.
        probe: samples a token of a version, or raises EngineError.
        """
        self._name: Final = name
        self._server: Final = server
        self._dialect: Final = dialect
        self._settings: Final = settings
        self._model_folder: Final = model_folder
        self._probe: Final = probe
        self._layout: dict[str, TensorShape] | None = None
        self._folder = model_folder
        """Where the weights lie that serve."""
        self.failure = ""
        """Why the server must not be asked: its weights are not known to be whole."""

    async def check(self, directory: str) -> None:
        """Compare the headers of new weights with what the server was started with.

        Raises:
            WeightsRefusedError: They don't fit, are damaged, or can't be compared.
        """
        if self._layout is None:
            await self._dialect.check_swaps(self._server)
            try:
                self._layout = await anyio.to_thread.run_sync(read_layout, self._model_folder)
            except WeightsRefusedError as error:
                raise WeightsRefusedError(
                    f"engine {self._name}: the folder that it was started with can't be read from here, so new weights can't "
                    f"be compared with it: {error}; give its path as seen from here"
                ) from error
        found = await anyio.to_thread.run_sync(read_layout, directory)
        check_layout(found, self._layout, directory)

    async def swap(
        self, directory: str, version: int, mode: SwapMode, *, former_version: int, stay_paused: bool
    ) -> None:
        """Put checked weights in.

        Raises:
            WeightsRefusedError: The server could not load them, or requests did not drain in time; the former ones serve.
            EngineUnavailableError: The server must be replaced.
        """
        if mode is SwapMode.IN_PLACE and version == former_version:
            mode = SwapMode.RECOMPUTE  # cached prefixes are told apart by their version
        await self._hold(mode, version, stay_paused)
        folder = str(await anyio.Path(directory).absolute())
        try:
            await self._dialect.swap(self._server, folder, version, mode, self._settings.load_timeout_s)
        except EngineError as error:
            await self._take_back(version, former_version, stay_paused, error)
        self._folder, self.failure = folder, ""
        if not stay_paused:
            await self._dialect.resume(self._server)

    async def _hold(self, mode: SwapMode, version: int, stay_paused: bool) -> None:
        limit_s = self._settings.drain_timeout_s
        try:
            await self._dialect.hold(self._server, mode, limit_s)
        except TimeoutError as error:
            if stay_paused:
                await self._dialect.pause(self._server)
            raise WeightsRefusedError(
                f"engine {self._name}: running requests did not end within {limit_s} s: version {version} is not loaded; "
                "use recompute, in_place or abort"
            ) from error
        except EngineError:
            if not stay_paused:
                with suppress(EngineError):  # whether or not it was on hold; the first error is the one to tell
                    await self._dialect.resume(self._server)
            raise

    async def _take_back(self, version: int, former_version: int, stay_paused: bool, cause: EngineError) -> None:
        """Load the former weights again and see whether they answer.

        Raises:
            WeightsRefusedError: They do.
            EngineUnavailableError: They don't.
        """
        if not self.failure and await self._restored(former_version, stay_paused):
            raise WeightsRefusedError(
                f"engine {self._name} could not load version {version}; version {former_version} serves on: {cause}"
            ) from cause
        self.failure = f"version {version} was not loaded whole: {cause}"
        self._server.break_off()
        raise EngineUnavailableError(f"engine {self._name} must be replaced: {self.failure}") from cause

    async def _restored(self, former_version: int, stay_paused: bool) -> bool:
        try:
            await anyio.to_thread.run_sync(read_layout, self._folder)
            await self._dialect.swap(
                self._server, self._folder, former_version, SwapMode.RECOMPUTE, self._settings.load_timeout_s
            )
            await self._dialect.resume(self._server)
            with anyio.fail_after(_PROBE_DEADLINE_S):
                await self._probe(former_version)
            if stay_paused:
                await self._dialect.pause(self._server)
        except (EngineError, TimeoutError) as error:
            log.error("weights could not be taken back", engine=self._name, error=str(error))  # noqa: TRY400
            return False
        return True
