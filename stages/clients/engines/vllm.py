"""vLLM's words: token ids in and out, its online reinforcement-learning endpoints (0.32.0).

Wants --enable-scale-out, --logprobs-mode processed_logprobs and VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import re
from typing import Final

import anyio
import msgspec

from schemas.messages.rollout import FinishReason
from stages.clients.engines.dialect import Event, Load, Served, ServerInfo, decode, finite, served_of, version_of
from stages.clients.engines.http import Server, error_of
from stages.clients.engines.labels import VersionSpan
from stages.clients.engines.settings import HttpEngineSettings
from stages.ports import EngineUnavailableError, GenerateRequest, SwapMode, WeightsRefusedError
from stages.weight_files.adapter_layout import AdapterLimits

_FINISHES: Final = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_DONE: Final = b"[DONE]"
_ID_PREFIX: Final = "generate-tokens-"
"""vLLM puts it before the ids of requests to this endpoint, and wants it when they are aborted."""
_MAX_SEED: Final = 2**63 - 1
_EXTENSION: Final = "headrace_vllm.WholeReload"
"""On CPUs vLLM's own reload leaves heads that are tied to the embeddings as they were."""
_DRAIN_LOOK_S: Final = 0.05
_ADAPTERS: Final = re.compile(rb"^vllm:lora_requests_info(\{[^}]*\}) (\S+)$", re.MULTILINE)
_ADAPTER_SETS: Final = re.compile(rb'(?:running|waiting)_lora_adapters="([^"]*)"')
_GAUGE: Final = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float | None = None


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[_Span] | None = None


class _Fault(msgspec.Struct):
    code: int = 500


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Fault | None = None


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Model(msgspec.Struct):
    id: str
    root: str = ""
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Parallel(msgspec.Struct):
    worker_extension_cls: str = ""


class _Device(msgspec.Struct):
    device: str | None = None


class _Lora(msgspec.Struct):
    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int | None = None
    target_modules: list[str] | None = None


class _Config(msgspec.Struct):
    parallel_config: _Parallel
    device_config: _Device
    lora_config: _Lora | None = None


class _ServerInfo(msgspec.Struct):
    vllm_config: _Config


class _Success(msgspec.Struct):
    success: bool = False


class VllmDialect:
    """One vLLM server."""

    def __init__(self, settings: HttpEngineSettings) -> None:
        self.generate_path: Final = "/inference/v1/generate"
        self._settings: Final = settings
        self._read_chunk: Final = msgspec.json.Decoder(_Chunk)
        self._reload = "reload_weights"

    def generate_body(self, request: GenerateRequest, request_id: str, served: Served) -> dict[str, object]:
        asked = request.settings
        params: dict[str, object] = {
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "logprobs": 0,
            "ignore_eos": True,  # what ends an answer is asked for by its id
            "stop_token_ids": list(asked.stop_token_ids),
            "detokenize": bool(asked.stop),
        }
        if asked.stop:
            params["stop"] = list(asked.stop)
        if asked.seed is not None:
            params["seed"] = asked.seed & _MAX_SEED
        if self._settings.stream_interval > 1:
            params["stream_interval"] = self._settings.stream_interval
        return {
            "request_id": request_id,
            "model": served.adapter or self._settings.model,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": params,
            "cache_salt": served.cache_salt,
            "stream": True,
        }

    def read(self, event: bytes, num_before: int) -> Event:  # noqa: ARG002 - events tell what is new
        if event == _DONE:
            return Event([], [])
        try:
            chunk = self._read_chunk.decode(event)
        except msgspec.MsgspecError as error:
            raise EngineUnavailableError(f"expected an event of vLLM's stream, found {event[:120]!r}") from error
        if chunk.error is not None:
            raise error_of(chunk.error.code, event, "vLLM, within a stream,")
        if not chunk.choices:
            return Event([], [])
        choice = chunk.choices[0]
        told = choice.logprobs.content if choice.logprobs is not None and choice.logprobs.content is not None else []
        if [entry.token_id for entry in told] != choice.token_ids:
            raise EngineUnavailableError(
                f"expected a log-prob for each of {len(choice.token_ids)} tokens, found {len(told)}: is the server started "
                "with --logprobs-mode processed_logprobs?"
            )
        finish = None if choice.finish_reason is None else _FINISHES.get(choice.finish_reason)
        if choice.finish_reason is not None and finish is None:
            raise EngineUnavailableError(f"vLLM ended an answer with {choice.finish_reason!r}")
        return Event(
            choice.token_ids,
            finite([entry.logprob for entry in told]),
            finish=finish,
            stop_reason=choice.stop_reason,
            spans=None if choice.weight_versions is None else [self._span(span) for span in choice.weight_versions],
        )

    def _span(self, span: _Span) -> VersionSpan:
        return VersionSpan(version_of(span.version, self._settings.initial_version), span.start, span.end)

    async def info(self, server: Server) -> ServerInfo:
        models = decode(await server.get("/v1/models"), _Models).data
        model = next((one for one in models if one.id == self._settings.model), None)
        if model is None:
            names = ", ".join(one.id for one in models) or "none"
            raise EngineUnavailableError(f"expected vLLM to serve the model {self._settings.model}, found {names}")
        served = await self.served(server)
        return ServerInfo(served=served, max_context=model.max_model_len or 0, model_folder=model.root)

    async def served(self, server: Server) -> Served:
        label = decode(await server.get("/weight_info"), _WeightInfo).weight_version
        return served_of(label, self._settings.initial_version)

    async def label(self, server: Server, served: Served) -> None:
        await server.post("/update_weight_version", {"new_version": served.label})

    async def load(self, server: Server) -> Load:
        served = await self.served(server)  # answered by the engine itself, unlike /health
        counts = {"running": 0.0, "waiting": 0.0}
        for match in _GAUGE.finditer(await server.get("/metrics")):
            counts[match[1].decode()] += float(match[2])
        return Load(served=served, num_running=int(counts["running"]), num_waiting=int(counts["waiting"]))

    async def abort(self, server: Server, request_id: str) -> None:
        await server.post("/abort_requests", {"request_ids": [_ID_PREFIX + request_id]})

    async def pause(self, server: Server) -> None:
        await server.post("/pause?mode=keep&clear_cache=false")

    async def resume(self, server: Server) -> None:
        await server.post("/resume")

    async def sleep(self, server: Server) -> None:
        await server.post("/sleep?level=1&mode=keep", timeout_s=self._settings.load_timeout_s)

    async def wake(self, server: Server) -> None:
        await server.post("/wake_up", timeout_s=self._settings.load_timeout_s)
        await server.post("/resume")

    async def _config(self, server: Server) -> _Config:
        # the first answer takes seconds: vLLM looks at its whole environment for it
        answer = await server.get("/server_info?config_format=json", timeout_s=self._settings.load_timeout_s)
        return decode(answer, _ServerInfo).vllm_config

    async def check_swaps(self, server: Server) -> None:
        config = await self._config(server)
        if config.parallel_config.worker_extension_cls == _EXTENSION:
            self._reload = "reload_weights_and_heads"
        elif config.device_config.device == "cpu":
            raise WeightsRefusedError(
                f"expected vLLM on CPUs to be started with --worker-extension-cls {_EXTENSION}, found "
                f"{config.parallel_config.worker_extension_cls or 'none'}: without it a head that is tied to the embeddings "
                "keeps its first weights"
            )

    async def hold(self, server: Server, mode: SwapMode, drain_timeout_s: float) -> None:
        match mode:
            case SwapMode.IN_PLACE | SwapMode.RECOMPUTE:
                await self.pause(server)
            case SwapMode.ABORT:
                await server.post("/pause?mode=abort&clear_cache=true")
            case SwapMode.DRAIN:
                with anyio.move_on_after(drain_timeout_s) as draining:
                    await server.post("/pause?mode=wait&clear_cache=true", timeout_s=drain_timeout_s + 1)
                if draining.cancelled_caught:
                    await self.resume(server)
                    raise TimeoutError

    async def swap(self, server: Server, directory: str, version: int, mode: SwapMode, timeout_s: float) -> None:
        call: dict[str, object] = {"method": self._reload, "kwargs": {"weights_path": directory}}
        await server.post("/collective_rpc", call, timeout_s=timeout_s)
        await self.label(server, Served(version))
        # in place, running requests hold their blocks: the reset fails, and the version in each request's salt keeps new
        # requests away from old prefixes
        running = "true" if mode is SwapMode.RECOMPUTE else "false"
        answer = await server.post(f"/reset_prefix_cache?reset_running_requests={running}")
        if mode is SwapMode.RECOMPUTE and not decode(answer, _Success).success:
            raise EngineUnavailableError(
                "vLLM did not reset its prefix cache: running requests would go on with old keys"
            )

    async def adapter_limits(self, server: Server) -> AdapterLimits:
        lora = (await self._config(server)).lora_config
        if lora is None:
            raise WeightsRefusedError(
                "expected vLLM to be started with --enable-lora, found it without: it takes no LoRA adapter (docs/engines.md)"
            )
        # an adapter whose requests wait must not be driven out by newer ones: its files may be gone when it is read again
        held = (lora.max_cpu_loras or lora.max_loras) // 2
        return AdapterLimits(
            max_rank=lora.max_lora_rank,
            max_adapters=min(lora.max_loras, held),
            targets=frozenset(lora.target_modules or ()),
        )

    async def adapters(self, server: Server) -> list[str]:
        return [one.id for one in decode(await server.get("/v1/models"), _Models).data if one.parent is not None]

    async def load_adapter(self, server: Server, name: str, directory: str, timeout_s: float) -> None:
        body = {"lora_name": name, "lora_path": directory}
        await server.post("/v1/load_lora_adapter", body, timeout_s=timeout_s)

    async def drop_adapter(self, server: Server, name: str, wait_s: float | None) -> None:
        if wait_s is not None:
            with anyio.fail_after(wait_s):
                while name in adapters_in_use(await server.get("/metrics")):
                    await anyio.sleep(_DRAIN_LOOK_S)
        await server.post("/v1/unload_lora_adapter", {"lora_name": name})


def adapters_in_use(metrics: bytes) -> set[str]:
    """Adapters of running and waiting requests, by vLLM's metrics: each set of them that there was stands there with the time
    when it was seen last. What requests that were aborted used stands there until the next step.
    """
    newest: bytes | None = None
    newest_s = float("-inf")
    for match in _ADAPTERS.finditer(metrics):
        if float(match[2]) >= newest_s:
            newest, newest_s = match[1], float(match[2])
    if newest is None:
        return set()
    return {name for told in _ADAPTER_SETS.findall(newest) for name in told.decode().split(",") if name}
