"""The built-in torch engine: the port `InferenceEngine` over the sampler of `stages.learning`.

    generate ──▶ waiting (bounded) ──▶ sampler's slots ──decode steps in a worker thread──▶ a bounded stream per request
    load_weights ──read in another thread──▶ swapped between two hops of the loop

One task owns the sampler. It goes through hops: admit, swap, then up to `steps_per_hop` decode steps in a worker thread,
then hand the tokens out. Nothing else touches the sampler while a hop is in the thread, so there is no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from schemas.messages.rollout import FinishReason
from stages.engine.admission import check_request
from stages.engine.model_folder import read_shape, read_weights
from stages.learning.qwen3 import ModelShape, Weights
from stages.learning.sampler import Finish, Sampled, Sampler, SampleRequest
from stages.ports import (
    BadRequestError,
    EngineHealth,
    EngineUnavailableError,
    GenerateRequest,
    SwapMode,
    TokenChunk,
    WeightsRefusedError,
)


class BuiltinEngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the built-in engine runs."""

    num_slots: int = 64
    """Requests decoded together."""
    max_waiting: int = 4096
    """Requests that may wait for a slot; more are refused as unavailable."""
    max_context: int = 0
    """Prompt and completion tokens of one request; 0 = what the model allows."""
    steps_per_hop: int = 8
    """Decode steps between two looks at new requests, aborts and weights."""
    swap_timeout_s: float = 120.0
    """The longest that running requests may take to drain before a swap fails."""
    seed: int = 0
    """Seeds requests that bring no seed of their own."""


class _Call:
    """A request on its way, from arrival to its last chunk."""

    def __init__(self, request: SampleRequest, send: MemoryObjectSendStream[TokenChunk]) -> None:
        self.request = request
        self.send = send


class _Swap(msgspec.Struct, frozen=True):
    weights: Weights
    version: int
    mode: SwapMode
    done: anyio.Event


class BuiltinEngine:
    """Made by `builtin_engine`."""

    def __init__(
        self, name: str, folder: str | Path, shape: ModelShape, sampler: Sampler, settings: BuiltinEngineSettings
    ) -> None:
        self._name = name
        self._folder = folder
        self._shape = shape
        self._sampler = sampler
        self._settings = settings
        self._max_context = min(settings.max_context or shape.max_context, shape.max_context)
        self._waiting: deque[_Call] = deque()
        self._calls: dict[str, _Call] = {}
        self._aborts: list[str] = []
        self._swap: _Swap | None = None
        self._swap_turn = anyio.Lock()
        self._paused = False
        self._failure = ""
        self._wake = anyio.Event()
        self._num_requests = 0
        self._num_tokens = 0

    @property
    def name(self) -> str:
        """Who answers."""
        return self._name

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._num_tokens

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample until a stop; closing the iterator aborts the request."""
        call, receive = self._accept(request)
        try:
            async with receive:
                async for chunk in receive:
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            raise EngineUnavailableError(f"engine {self._name} stopped: {self._failure or 'shut down'}")
        finally:
            if self._calls.get(request.request_id) is call:
                self._aborts.append(request.request_id)
                self._rouse()

    def _accept(self, request: GenerateRequest) -> tuple[_Call, MemoryObjectReceiveStream[TokenChunk]]:
        if self._failure:
            raise EngineUnavailableError(f"engine {self._name} failed: {self._failure}")
        check_request(
            request,
            vocab_size=self._shape.vocab_size,
            max_context=self._max_context,
            version=self._sampler.version,
        )
        if request.request_id in self._calls:
            raise BadRequestError(f"request id {request.request_id!r} is in use: each call needs its own")
        if len(self._waiting) >= self._settings.max_waiting:
            raise EngineUnavailableError(f"engine {self._name} is full: {len(self._waiting)} requests wait")
        wanted = request.settings
        seed = wanted.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._settings.seed, self._num_requests]).generate_state(1)[0])
        self._num_requests += 1
        # every chunk but the last holds a token, so the stream never fills
        send, receive = anyio.create_memory_object_stream[TokenChunk](wanted.max_new_tokens + 1)
        call = _Call(
            SampleRequest(
                request_id=request.request_id,
                prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
                max_new_tokens=wanted.max_new_tokens,
                temperature=wanted.temperature,
                top_p=wanted.top_p,
                top_k=wanted.top_k,
                stop_token_ids=frozenset(wanted.stop_token_ids),
                seed=seed & 0xFFFFFFFFFFFFFFFF,
            ),
            send,
        )
        self._calls[request.request_id] = call
        self._waiting.append(call)
        self._rouse()
        return call, receive

    async def abort(self, request_id: str) -> None:
        """End a running request with finish reason abort; unknown ids are fine."""
        if request_id in self._calls:
            self._aborts.append(request_id)
            self._rouse()

    async def pause(self) -> None:
        """Sample no further token until resume; requests stay."""
        self._paused = True

    async def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._rouse()

    async def load_weights(self, directory: str, version: int, mode: SwapMode) -> None:
        """Serve the weights of a HF folder from now on.

        Raises:
            WeightsRefusedError: Names, shapes or files don't fit, or requests did not drain within `swap_timeout_s`; the old
                weights still serve.
            EngineUnavailableError: The engine failed.
        """
        await self._load(lambda: read_weights(directory, self._shape), version, mode)

    async def load_adapter(self, directory: str, version: int, mode: SwapMode) -> None:
        """Serve the folder it was started with, with the LoRA adapter of a folder on it, from now on.

        Raises:
            WeightsRefusedError, EngineUnavailableError: as `load_weights`.
        """
        await self._load(lambda: read_weights(self._folder, self._shape, adapter=directory), version, mode)

    async def _load(self, read: Callable[[], Weights], version: int, mode: SwapMode) -> None:
        async with self._swap_turn:
            weights = await anyio.to_thread.run_sync(read)
            if self._failure:
                raise EngineUnavailableError(f"engine {self._name} failed: {self._failure}")
            swap = _Swap(weights, version, mode, anyio.Event())
            self._swap = swap
            self._rouse()
            try:
                with anyio.fail_after(self._settings.swap_timeout_s):
                    await swap.done.wait()
            except TimeoutError as error:
                raise WeightsRefusedError(
                    f"{self._sampler.num_running} requests did not end within {self._settings.swap_timeout_s} s: "
                    f"version {version} is not loaded; use recompute, in_place or abort"
                ) from error
            finally:
                self._swap = None
                self._rouse()
            if self._sampler.version != version:
                raise EngineUnavailableError(f"engine {self._name} failed: {self._failure}")

    async def health(self) -> EngineHealth:
        """How it is."""
        return EngineHealth(
            ready=not self._failure,
            version=self._sampler.version,
            num_running=self._sampler.num_running,
            num_waiting=len(self._waiting),
            max_context=self._max_context,
            detail=self._failure or ("paused" if self._paused else ""),
        )

    def _rouse(self) -> None:
        self._wake.set()

    async def _run(self) -> None:
        """The loop that owns the sampler; an error in it is the engine's end, told to every caller."""
        try:
            while True:
                await self._wake.wait()
                self._wake = anyio.Event()
                while await self._hop():
                    await anyio.lowlevel.checkpoint()
        except (RuntimeError, ValueError, MemoryError) as error:  # what torch raises
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._failure = self._failure or "shut down"
            if self._swap:
                self._swap.done.set()
            for call in self._calls.values():
                call.send.close()
            self._calls.clear()
            self._waiting.clear()

    async def _hop(self) -> bool:
        """One round; False when there is nothing to do until something new comes."""
        self._apply_aborts()
        self._apply_swap()
        if self._paused:
            return False
        draining = self._swap is not None
        while self._waiting and self._sampler.num_free > 0 and not draining:
            self._sampler.add(self._waiting.popleft().request)
        if not self._sampler.num_running:
            return False
        sampled = await anyio.to_thread.run_sync(self._steps)
        self._num_tokens += len(sampled)
        self._hand_out(sampled)
        return True

    def _steps(self) -> list[Sampled]:
        """In the worker thread."""
        sampled: list[Sampled] = []
        for _ in range(self._settings.steps_per_hop):
            sampled += self._sampler.step()
            if not self._sampler.num_running or (self._waiting and self._sampler.num_free):
                break
        return sampled

    def _apply_aborts(self) -> None:
        ids, self._aborts = self._aborts, []
        for request_id in ids:
            call = self._calls.get(request_id)
            if call is None:
                continue
            if call in self._waiting:
                self._waiting.remove(call)
                self._hand_out([Sampled(request_id, -1, 0.0, self._sampler.version, Finish.ABORT)])
            else:
                self._hand_out(self._sampler.abort(request_id))

    def _apply_swap(self) -> None:
        swap = self._swap
        if swap is None or swap.done.is_set():
            return
        match swap.mode:
            case SwapMode.DRAIN:
                if self._sampler.num_running:
                    return
            case SwapMode.ABORT:
                self._hand_out(self._sampler.abort_all())
            case SwapMode.IN_PLACE | SwapMode.RECOMPUTE:
                pass
        self._sampler.swap(swap.weights, swap.version, recompute=swap.mode is SwapMode.RECOMPUTE)
        self._swap = None
        swap.done.set()

    def _hand_out(self, sampled: list[Sampled]) -> None:
        """Each request's tokens of a hop as one chunk: a hop has one version."""
        by_request: dict[str, list[Sampled]] = {}
        for token in sampled:
            by_request.setdefault(token.request_id, []).append(token)
        for request_id, tokens in by_request.items():
            call = self._calls.get(request_id)
            if call is None:
                continue
            last = tokens[-1]
            if last.finish is not None:
                del self._calls[request_id]
            try:
                call.send.send_nowait(_chunk(tokens))
            except anyio.BrokenResourceError:  # whoever asked has gone; its abort is on the way
                continue
            if last.finish is not None:
                call.send.close()


def _chunk(tokens: list[Sampled]) -> TokenChunk:
    last = tokens[-1]
    real = [token for token in tokens if token.token_id >= 0]
    return TokenChunk(
        token_ids=np.array([token.token_id for token in real], dtype=np.int32),
        logprobs=np.array([token.logprob for token in real], dtype=np.float32),
        version=last.version,
        finish_reason=None if last.finish is None else FinishReason(last.finish.value),
        stop_reason=last.token_id if last.finish is Finish.STOP else None,
    )


@asynccontextmanager
async def builtin_engine(
    name: str, folder: str | Path, settings: BuiltinEngineSettings, *, version: int = 0
) -> AsyncGenerator[BuiltinEngine]:
    """Load a HF folder and serve it until the block ends. Torch's thread count is the process's own affair.

    Raises:
        WeightsRefusedError: The folder can't be served.
    """
    shape = await anyio.to_thread.run_sync(read_shape, folder)
    weights = await anyio.to_thread.run_sync(read_weights, folder, shape)
    engine = BuiltinEngine(
        name, folder, shape, Sampler(weights, num_slots=settings.num_slots, version=version), settings
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine._run)  # noqa: SLF001 - the loop is not for callers  # pyright: ignore[reportPrivateUsage]
        try:
            yield engine
        finally:
            tasks.cancel_scope.cancel()
