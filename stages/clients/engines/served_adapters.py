"""LoRA adapters on a server: each version is one of its own, beside the others, on the weights that the server started with.

    fits? ─▶ room for one more? ─▶ load under a new name ─▶ it answers ─▶ label: new requests ask for it
              │                     └─ fails ─▶ forgotten again; the old version serves, untouched
              └─ no ─▶ the oldest one's requests end, at last by an abort ─▶ it is forgotten

A request is sampled by the adapter that it names from its first token to its last, so a swap stops nobody and every
log-prob is exact. The server's label is the newest adapter's name: that is how clients in other processes learn of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import anyio
import anyio.to_thread
import structlog

from stages.clients.engines.dialect import Dialect, Served, adapter_name, adapter_version, is_adapter_name
from stages.clients.engines.http import Server
from stages.clients.engines.settings import HttpEngineSettings
from stages.ports import EngineError, EngineUnavailableError, SwapMode, WeightsRefusedError
from stages.weight_files.adapter_layout import AdapterLimits, check_adapter
from stages.weight_files.layout import TensorShape, read_layout

log = structlog.get_logger("headrace.engines")

_PROBE_DEADLINE_S: Final = 30.0
_LEAST_ADAPTERS: Final = 2
"""The new one and the one whose requests still run."""


class ServedAdapters:
    """One server's adapters."""

    def __init__(
        self,
        name: str,
        server: Server,
        dialect: Dialect,
        settings: HttpEngineSettings,
        model_folder: str,
        *,
        probe: Callable[[Served], Awaitable[None]],
    ) -> None:
        """Args:
        model_folder: what the server was started with.
        probe: samples a token, or raises EngineError.
        """
        self._name: Final = name
        self._server: Final = server
        self._dialect: Final = dialect
        self._settings: Final = settings
        self._model_folder: Final = model_folder
        self._probe: Final = probe
        self._base: dict[str, TensorShape] | None = None
        self._limits: AdapterLimits | None = None

    async def check(self, directory: str) -> None:
        """Compare an adapter with the model that the server was started with, before the server is touched.

        Raises:
            WeightsRefusedError: It does not fit, is damaged, or the server takes none.
        """
        served = await self._dialect.served(self._server)
        if not served.adapter and served.version != self._settings.initial_version:
            raise WeightsRefusedError(
                f"engine {self._name}: expected the weights that it started with (version {self._settings.initial_version}), "
                f"on which adapters lie, found version {served.version}: start the server anew"
            )
        limits = await self._known_limits()
        if self._base is None:
            try:
                self._base = await anyio.to_thread.run_sync(read_layout, self._model_folder)
            except WeightsRefusedError as error:
                raise WeightsRefusedError(
                    f"engine {self._name}: the folder that it was started with can't be read from here, so an adapter can't be "
                    f"compared with it: {error}; give its path as seen from here"
                ) from error
        await anyio.to_thread.run_sync(check_adapter, directory, self._base, limits)

    async def _known_limits(self) -> AdapterLimits:
        if self._limits is None:
            limits = await self._dialect.adapter_limits(self._server)
            if limits.max_adapters < _LEAST_ADAPTERS:
                raise WeightsRefusedError(
                    f"engine {self._name}: expected a server that serves {_LEAST_ADAPTERS} adapters at once or more, found one "
                    f"for {limits.max_adapters}: start it with more (docs/engines.md)"
                )
            self._limits = limits
        return self._limits

    async def put(self, directory: str, version: int, mode: SwapMode, *, paused: bool) -> Served:
        """Serve a checked adapter to new requests; what is served now.

        Running requests go on with the adapter that they began with. `abort` ends them when the new one serves, `drain` waits for
        their end before.

        Raises:
            WeightsRefusedError: The server could not load it, or requests did not drain; the old version serves.
            EngineUnavailableError: The server is gone.
        """
        former = await self._dialect.served(self._server)
        served = Served(version, adapter_name(version))
        folder = str(await anyio.Path(directory).absolute())
        await self._make_room(former, paused=paused)
        try:
            await self._dialect.load_adapter(self._server, served.adapter, folder, self._settings.load_timeout_s)
            if not paused:
                with anyio.fail_after(_PROBE_DEADLINE_S):
                    await self._probe(served)
            await self._switch(served, mode, paused=paused)
        except (EngineError, TimeoutError) as error:
            await self._give_up(served, former, error, paused=paused)
        return served

    async def _make_room(self, former: Served, *, paused: bool) -> None:
        names = [name for name in await self._dialect.adapters(self._server) if is_adapter_name(name)]
        old = sorted((name for name in names if name != former.adapter), key=adapter_version)
        room_for = (await self._known_limits()).max_adapters - 1
        unwanted = old[: max(0, len(names) - room_for)]
        if unwanted and not paused:
            await self._probe(former)  # a step: only then a server knows of what was aborted
        for name in unwanted:
            try:
                await self._dialect.drop_adapter(self._server, name, 0.0 if paused else self._settings.adapter_wait_s)
            except TimeoutError:
                await self._drop_with_requests(name, paused=paused)

    async def _drop_with_requests(self, name: str, *, paused: bool) -> None:
        log.warning(
            "running requests are aborted: the oldest adapter's place is needed", engine=self._name, adapter=name
        )
        await self._dialect.hold(self._server, SwapMode.ABORT, self._settings.drain_timeout_s)
        if not paused:
            await self._dialect.resume(self._server)
        try:
            await self._dialect.drop_adapter(self._server, name, None)
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"engine {self._name}: adapter {name} was not unloaded after its requests were aborted: restart the server"
            ) from error

    async def _switch(self, served: Served, mode: SwapMode, *, paused: bool) -> None:
        match mode:
            case SwapMode.RECOMPUTE | SwapMode.IN_PLACE:
                await self._dialect.label(self._server, served)
                return
            case SwapMode.ABORT:
                await self._dialect.label(self._server, served)  # first: whoever is aborted goes on with the new one
                await self._dialect.hold(self._server, mode, self._settings.drain_timeout_s)
            case SwapMode.DRAIN:
                await self._dialect.hold(self._server, mode, self._settings.drain_timeout_s)
                await self._dialect.label(self._server, served)
        if not paused:
            await self._dialect.resume(self._server)

    async def _give_up(self, served: Served, former: Served, cause: Exception, *, paused: bool) -> None:
        """Forget an adapter that does not serve; the ones before are as they were.

        Raises:
            WeightsRefusedError: The old version serves.
            EngineUnavailableError: The server is gone.
        """
        with suppress(EngineError, TimeoutError):  # whether it was known or not; the first error is the one to tell
            await self._dialect.drop_adapter(self._server, served.adapter, self._settings.adapter_wait_s)
        if not paused:
            with suppress(EngineError):  # whether or not it was on hold
                await self._dialect.resume(self._server)
        now = await self._dialect.served(self._server)
        if now != former:
            raise EngineUnavailableError(
                f"engine {self._name}: expected version {former.version} to serve on, found {now.label}: {cause}"
            ) from cause
        raise WeightsRefusedError(
            f"engine {self._name} could not load version {served.version}; version {former.version} serves on: "
            f"{str(cause) or 'no answer in time'}"
        ) from cause
