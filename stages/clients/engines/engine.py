"""The port `InferenceEngine` over one server: what is asked is checked first, what comes is labelled, what fails is typed.

generate ─▶ check ids and context ─▶ POST, a stream ─▶ Dialect.read ─▶ Labeller ─▶ chunks of one version each
load_weights ─▶ served_weights.py
load_adapter ─▶ served_adapters.py
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import structlog

from schemas.config import EngineKind
from schemas.messages.rollout import FinishReason
from stages.clients.engines.dialect import Dialect, Event, Served, ServerInfo
from stages.clients.engines.http import Server, open_server
from stages.clients.engines.labels import Labeller, VersionSpan
from stages.clients.engines.served_adapters import ServedAdapters
from stages.clients.engines.served_weights import ServedWeights
from stages.clients.engines.settings import HttpEngineSettings
from stages.clients.engines.sglang import SglangDialect
from stages.clients.engines.vllm import VllmDialect
from stages.clients.engines.watch import VersionWatch
from stages.engine.admission import check_request
from stages.ports import (
    BadRequestError,
    EngineError,
    EngineHealth,
    EngineUnavailableError,
    GenerateRequest,
    SamplingSettings,
    SwapMode,
    TokenChunk,
    WeightsRefusedError,
)

log = structlog.get_logger("headrace.engines")


class HttpEngine:
    """Made by `http_engine`."""

    def __init__(
        self,
        name: str,
        server: Server,
        dialect: Dialect,
        settings: HttpEngineSettings,
        info: ServerInfo,
        vocab_size: int,
    ) -> None:
        self._name: Final = name
        self._server: Final = server
        self._dialect: Final = dialect
        self._settings: Final = settings
        self._vocab_size: Final = vocab_size
        self._max_context: Final = min(settings.max_context or info.max_context, info.max_context)
        self._served = info.served
        folder = settings.model_folder or info.model_folder
        self._weights: Final = ServedWeights(
            name, server, dialect, settings, folder, probe=lambda version: self._probe(Served(version))
        )
        self._adapters: Final = ServedAdapters(name, server, dialect, settings, folder, probe=self._probe)
        self._running: dict[str, str] = {}
        """request id → its id at the server."""
        self._watch: Final = VersionWatch(lambda: dialect.served(server), settings.confirm_interval_s)
        self._swap_turn: Final = anyio.Lock()
        self._open = anyio.Event()
        """Set while new requests may be sent."""
        self._open.set()
        self._paused = False
        self._num_tokens = 0

    @property
    def name(self) -> str:
        """Who answers."""
        return self._name

    @property
    def num_tokens(self) -> int:
        """Tokens that came through here so far."""
        return self._num_tokens

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample until a stop; closing the iterator aborts the request.

        Tokens that came before the connection broke are handed out before the error, where their version is known.
        """
        served = await self._admit(request)
        server_id = f"{secrets.token_hex(6)}-{request.request_id}"
        self._running[request.request_id] = server_id
        ended = False
        try:
            labels = Labeller(served.version)
            body = self._dialect.generate_body(request, server_id, served)
            async with self._server.stream(self._dialect.generate_path, body) as batches:
                async for events in batches:
                    last = self._take(events, labels, served)
                    if last.finish is not None:
                        ended = True
                        for chunk in await self._finish(last, labels, served):
                            yield chunk
                        return
                    chunk = await self._confirmed(last, labels)
                    if chunk is not None:
                        yield chunk
            raise EngineUnavailableError(f"engine {self._name}: the stream ended without saying why")
        except EngineError:
            ended = True  # the server has ended it, or is gone
            raise
        finally:
            del self._running[request.request_id]
            if not ended:
                await self._abort_at_server(server_id)

    async def _admit(self, request: GenerateRequest) -> Served:
        """What is to sample a request that may be sent."""
        self._refuse_if_failed()
        check_request(
            request,
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            version=request.min_version,  # the server's version is looked at below
        )
        if request.request_id in self._running:
            raise BadRequestError(f"request id {request.request_id!r} is in use: each call needs its own")
        await self._open.wait()
        if self._served.version < request.min_version or self._settings.adapters or self._served.adapter:
            self._served = await self._watch.after_now()
        if self._served.version < request.min_version:
            raise EngineUnavailableError(
                f"engine {self._name}: expected weights of version {request.min_version} or newer, serving "
                f"{self._served.version}"
            )
        self._refuse_if_failed()
        return self._served

    def _take(self, events: list[bytes], labels: Labeller, served: Served) -> Event:
        """Read what came together; the last event that says something. An adapter's tokens are of its version."""
        last = Event([], [])
        for content in events:
            event = self._dialect.read(content, labels.num_received)
            labels.add(event.ids, event.logprobs)
            self._num_tokens += len(event.ids)
            if event.version is not None or event.finish is not None:
                last = event
            if event.finish is not None:
                break
        if not served.adapter:
            return last
        spans = None if last.finish is None else [VersionSpan(served.version, 0, labels.num_received)]
        return msgspec.structs.replace(last, version=served.version, spans=spans)

    async def _confirmed(self, last: Event, labels: Labeller) -> TokenChunk | None:
        """What came and can be handed out, its version confirmed by the stream itself or by asking."""
        num_tokens = labels.num_received
        if not labels.num_waiting:
            return None
        version = last.version
        if version is None:
            served = self._served = await self._watch.after_now()
            version = self._settings.initial_version if served.adapter else served.version
        return labels.confirm(num_tokens, version)

    async def _finish(self, last: Event, labels: Labeller, served: Served) -> list[TokenChunk]:
        finish = last.finish or FinishReason.STOP
        if last.spans is None and labels.num_received:
            raise EngineUnavailableError(
                f"engine {self._name}: the answer ended without the versions of its tokens: is the server older than the "
                "versions in docs/engines.md?"
            )
        chunks = labels.finish(last.spans or [], finish, last.stop_reason)
        if not served.adapter and chunks[-1].version > self._served.version:
            self._served = Served(chunks[-1].version)
        return chunks

    async def _abort_at_server(self, server_id: str) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._dialect.abort(self._server, server_id)
            except EngineError as error:
                log.warning("a request that nobody waits for could not be aborted", engine=self._name, error=str(error))

    async def abort(self, request_id: str) -> None:
        """End a running request with finish reason abort; unknown ids are fine."""
        server_id = self._running.get(request_id)
        if server_id is not None:
            await self._dialect.abort(self._server, server_id)

    # -- the engine itself

    async def pause(self) -> None:
        """Sample no further token until resume; requests stay."""
        async with self._swap_turn:
            self._paused = True
            await self._dialect.pause(self._server)

    async def resume(self) -> None:
        """Go on."""
        async with self._swap_turn:
            await self._dialect.resume(self._server)
            self._paused = False

    async def sleep(self) -> None:
        """Pause, and give the accelerator's memory up where the server was started for that."""
        if not self._settings.offload_in_sleep:
            await self.pause()
            return
        async with self._swap_turn:
            self._paused = True
            await self._dialect.sleep(self._server)

    async def wake(self) -> None:
        """Go on with the weights that it had."""
        if not self._settings.offload_in_sleep:
            await self.resume()
            return
        async with self._swap_turn:
            await self._dialect.wake(self._server)
            self._paused = False

    async def health(self) -> EngineHealth:
        """How it is; what can't be told is said in `detail`, not raised."""
        detail = self._weights.failure or ("paused" if self._paused else "")
        try:
            load = await self._dialect.load(self._server)
        except EngineError as error:
            return EngineHealth(
                ready=False,
                version=self._served.version,
                num_running=len(self._running),
                num_waiting=0,
                max_context=self._max_context,
                detail=str(error),
            )
        self._served = load.served
        return EngineHealth(
            ready=not self._weights.failure,
            version=load.served.version,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            max_context=self._max_context,
            detail=detail,
        )

    # -- weights

    async def load_weights(self, directory: str, version: int, mode: SwapMode) -> None:
        """Serve the weights of a HF folder from now on.

        Raises:
            WeightsRefusedError: They don't fit, the server could not load them, or running requests did not drain in time; the
                old ones serve.
            EngineUnavailableError: The server is gone or half loaded: requests are refused until a load succeeds.
        """
        async with self._swap_turn:
            if self._served.adapter:
                raise WeightsRefusedError(
                    f"engine {self._name} serves LoRA adapters, which lie on the weights that it started with: start it anew to "
                    f"serve whole weights; version {self._served.version} serves on"
                )
            await self._weights.check(directory)
            with anyio.CancelScope(shield=True):  # a swap that is left halfway leaves a server on hold
                self._open = anyio.Event()
                try:
                    await self._weights.swap(
                        directory, version, mode, former_version=self._served.version, stay_paused=self._paused
                    )
                    self._served = Served(version)
                finally:
                    self._open.set()

    async def load_adapter(self, directory: str, version: int, mode: SwapMode) -> None:
        """Serve the weights that the server started with, with the LoRA adapter of a folder on them, from now on.

        Running requests end with what they began with, whose version their tokens have.

        Raises:
            WeightsRefusedError: It does not fit, or the server takes none, or could not load it; the old version serves.
            EngineUnavailableError: The server is gone.
        """
        async with self._swap_turn:
            await self._adapters.check(directory)
            with anyio.CancelScope(shield=True):  # left halfway, an adapter would take a place for ever
                if mode is SwapMode.DRAIN:
                    self._open = anyio.Event()  # SGLang waits for a moment without requests
                try:
                    self._served = await self._adapters.put(directory, version, mode, paused=self._paused)
                finally:
                    self._open.set()

    async def _probe(self, served: Served) -> None:
        request = GenerateRequest(
            request_id="",
            prompt_ids=np.zeros(1, dtype=np.int32),
            settings=SamplingSettings(temperature=0.0, max_new_tokens=1),
        )
        labels = Labeller(served.version)
        body = self._dialect.generate_body(request, f"{secrets.token_hex(6)}-probe", served)
        async with self._server.stream(self._dialect.generate_path, body) as batches:
            async for events in batches:
                last = self._take(events, labels, served)
                if last.finish is not None and labels.num_received:
                    return
        raise EngineUnavailableError(f"engine {self._name}: a probe was answered without a token")

    def _refuse_if_failed(self) -> None:
        if self._weights.failure:
            raise EngineUnavailableError(f"engine {self._name} must be replaced: {self._weights.failure}")


class _ModelConfig(msgspec.Struct):
    vocab_size: int = 0


class _NestedConfig(msgspec.Struct):
    vocab_size: int = 0
    text_config: _ModelConfig = msgspec.field(default_factory=_ModelConfig)


def _vocab_size(settings: HttpEngineSettings, info: ServerInfo, name: str) -> int:
    if settings.vocab_size:
        return settings.vocab_size
    path = Path(settings.model_folder or info.model_folder) / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_NestedConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineError(
            f"engine {name}: expected the vocabulary's size in {path} (an unknown id kills some servers), found: {error}; "
            "give vocab_size or model_folder"
        ) from error
    return config.vocab_size or config.text_config.vocab_size


@asynccontextmanager
async def http_engine(
    kind: EngineKind, name: str, url: str, settings: HttpEngineSettings | None = None
) -> AsyncGenerator[HttpEngine]:
    """A server that runs, as an engine, until the block ends.

    Raises:
        EngineError: Neither vLLM nor SGLang, or its vocabulary is not known.
        EngineUnavailableError: It does not answer, or is not what was expected.
    """
    settings = settings or HttpEngineSettings()
    dialect: Dialect
    match kind:
        case EngineKind.VLLM:
            dialect = VllmDialect(settings)
        case EngineKind.SGLANG:
            dialect = SglangDialect(settings)
        case _:
            raise EngineError(f"engine {name}: expected kind vllm or sglang, found {kind}")
    async with open_server(name, url, settings) as server:
        info = await dialect.info(server)
        vocab_size = await anyio.to_thread.run_sync(_vocab_size, settings, info, name)
        yield HttpEngine(name, server, dialect, settings, info, vocab_size)
