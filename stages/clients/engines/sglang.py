"""SGLang's words: its native /generate and its weight-update endpoints (0.5.23)."""

from __future__ import annotations

from typing import Final

import anyio
import msgspec

from schemas.messages.rollout import FinishReason
from stages.clients.engines.dialect import Event, Load, Served, ServerInfo, decode, finite, served_of, version_of
from stages.clients.engines.http import Server, error_of
from stages.clients.engines.labels import VersionSpan
from stages.clients.engines.settings import HttpEngineSettings
from stages.ports import BadRequestError, EngineUnavailableError, GenerateRequest, SwapMode, WeightsRefusedError
from stages.weight_files.adapter_layout import AdapterLimits

_FINISHES: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_DONE: Final = b"[DONE]"
_MAX_SEED: Final = 2**31 - 1
_DRAIN_LOOK_S: Final = 0.05
_FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_UNUSED_PLACES: Final = 2
"""Of the context length: answers that would reach further are cut without a word."""


class _Finish(msgspec.Struct):
    type: str
    matched: str | int | None = None
    message: str = ""
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    completion_tokens: int
    weight_version: str
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, object]] = []
    weight_versions: list[_Span] | None = None


class _Fault(msgspec.Struct):
    code: int = 500


class _Chunk(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: _Fault | None = None


class _ModelInfo(msgspec.Struct):
    model_path: str
    weight_version: str


class _ServerInfo(msgspec.Struct):
    context_length: int | None = None
    max_req_input_len: int = 0
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loras_per_batch: int = 8
    lora_target_modules: list[str] | None = None


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _RankLoad(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0


class _Loads(msgspec.Struct):
    loads: list[_RankLoad]


class SglangDialect:
    """One SGLang server."""

    def __init__(self, settings: HttpEngineSettings) -> None:
        self.generate_path: Final = "/generate"
        self._settings: Final = settings
        self._read_chunk: Final = msgspec.json.Decoder(_Chunk)

    def generate_body(self, request: GenerateRequest, request_id: str, served: Served) -> dict[str, object]:
        asked = request.settings
        params: dict[str, object] = {
            "max_new_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k or -1,
            # it switches the stop ids off, too: an answer that asks for some ends at the model's own end token as well
            "ignore_eos": not asked.stop_token_ids,
        }
        if asked.stop_token_ids:
            params["stop_token_ids"] = list(asked.stop_token_ids)
        if asked.stop:
            params["stop"] = list(asked.stop)
        if asked.seed is not None:
            params["sampling_seed"] = asked.seed & _MAX_SEED
        if self._settings.stream_interval > 1:
            params["stream_interval"] = self._settings.stream_interval
        body: dict[str, object] = {
            "rid": request_id,
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": params,
            "cache_salt": served.cache_salt,
            "return_logprob": True,
            "stream": True,
        }
        if served.adapter:
            body["lora_path"] = served.adapter
        return body

    def read(self, event: bytes, num_before: int) -> Event:
        if event == _DONE:
            return Event([], [])
        try:
            chunk = self._read_chunk.decode(event)
        except msgspec.MsgspecError as error:
            raise EngineUnavailableError(f"expected an event of SGLang's stream, found {event[:120]!r}") from error
        if chunk.error is not None:
            raise error_of(chunk.error.code, event, "SGLang, within a stream,")
        meta = chunk.meta_info
        if meta is None:
            raise EngineUnavailableError(f"expected an event of SGLang's stream, found {event[:120]!r}")
        finish = meta.finish_reason
        if finish is not None and finish.type == "abort" and finish.status_code is not None:
            raise error_of(finish.status_code, finish.message.encode(), "SGLang")
        if finish is not None and finish.type not in _FINISHES:
            raise EngineUnavailableError(f"SGLang ended an answer with {finish.type!r}")
        ids, logprobs = _new(chunk.output_ids, meta, num_before)
        initial = self._settings.initial_version
        spans = meta.weight_versions
        return Event(
            ids,
            logprobs,
            version=version_of(meta.weight_version, initial),
            finish=None if finish is None else _FINISHES[finish.type],
            stop_reason=None if finish is None else finish.matched,
            spans=None
            if spans is None
            else [VersionSpan(version_of(s.version, initial), s.start, s.end) for s in spans],
        )

    async def info(self, server: Server) -> ServerInfo:
        model = decode(await server.get("/model_info"), _ModelInfo)
        info = decode(await server.get("/server_info"), _ServerInfo)
        return ServerInfo(
            served=served_of(model.weight_version, self._settings.initial_version),
            max_context=(info.context_length or info.max_req_input_len) - _UNUSED_PLACES,
            model_folder=model.model_path,
        )

    async def served(self, server: Server) -> Served:
        label = decode(await server.get("/model_info"), _ModelInfo).weight_version
        return served_of(label, self._settings.initial_version)

    async def label(self, server: Server, served: Served) -> None:
        await server.post("/update_weight_version", {"new_version": served.label, "abort_all_requests": False})

    async def load(self, server: Server) -> Load:
        """Not from /health: that samples a token and takes a second or more."""
        served = await self.served(server)
        ranks = decode(await server.get("/v1/loads"), _Loads).loads
        return Load(
            served=served,
            num_running=sum(rank.num_running_reqs for rank in ranks),
            num_waiting=sum(rank.num_waiting_reqs for rank in ranks),
        )

    async def abort(self, server: Server, request_id: str) -> None:
        """Ends every request whose id begins so: ids must not begin with one another."""
        await server.post("/abort_request", {"rid": request_id})

    async def pause(self, server: Server) -> None:
        await server.post("/pause_generation", {"mode": "in_place"})

    async def resume(self, server: Server) -> None:
        await server.post("/continue_generation", {"torch_empty_cache": False})

    async def sleep(self, server: Server) -> None:
        await server.post("/pause_generation", {"mode": "retract"})
        await server.post("/release_memory_occupation", {}, timeout_s=self._settings.load_timeout_s)

    async def wake(self, server: Server) -> None:
        await server.post("/resume_memory_occupation", {}, timeout_s=self._settings.load_timeout_s)
        await self.resume(server)

    async def check_swaps(self, server: Server) -> None:
        """It always can."""

    async def hold(self, server: Server, mode: SwapMode, drain_timeout_s: float) -> None:
        match mode:
            case SwapMode.IN_PLACE:
                await self.pause(server)
            case SwapMode.RECOMPUTE:
                await server.post("/pause_generation", {"mode": "retract"})
            case SwapMode.ABORT:
                await server.post("/pause_generation", {"mode": "abort"}, timeout_s=self._settings.load_timeout_s)
            case SwapMode.DRAIN:
                with anyio.fail_after(drain_timeout_s):
                    while not await self._idle(server):
                        await anyio.sleep(_DRAIN_LOOK_S)
                await server.post("/pause_generation", {"mode": "retract"})

    async def _idle(self, server: Server) -> bool:
        """Whether nothing runs or waits: only then the scheduler flushes. What /v1/loads counts lags some steps behind."""
        try:
            await server.post("/flush_cache")
        except BadRequestError:
            return False
        return True

    async def swap(self, server: Server, directory: str, version: int, mode: SwapMode, timeout_s: float) -> None:
        # in place, running requests hold their blocks: the flush would fail, and the version in each request's salt keeps
        # new requests away from old prefixes
        update: dict[str, object] = {
            "model_path": directory,
            "weight_version": str(version),
            "flush_cache": mode is not SwapMode.IN_PLACE,
        }
        await server.post("/update_weights_from_disk", update, timeout_s=timeout_s)

    async def adapter_limits(self, server: Server) -> AdapterLimits:
        info = decode(await server.get("/server_info"), _ServerInfo)
        targets = set(info.lora_target_modules or ())
        if not info.enable_lora or not info.max_lora_rank:
            raise WeightsRefusedError(
                "expected SGLang to be started with --enable-lora, --max-lora-rank and --lora-target-modules, found it without: "
                "it takes no LoRA adapter (docs/engines.md)"
            )
        for fused, parts in _FUSED.items():
            if fused in targets:
                targets.update(parts)
        return AdapterLimits(
            max_rank=info.max_lora_rank,
            max_adapters=info.max_loras_per_batch - 1,  # requests without one count, too
            targets=frozenset() if "all" in targets else frozenset(targets),
        )

    async def adapters(self, server: Server) -> list[str]:
        return [one.id for one in decode(await server.get("/v1/models"), _Models).data if one.parent is not None]

    async def load_adapter(self, server: Server, name: str, directory: str, timeout_s: float) -> None:
        await server.post("/load_lora_adapter", {"lora_name": name, "lora_path": directory}, timeout_s=timeout_s)

    async def drop_adapter(self, server: Server, name: str, wait_s: float | None) -> None:
        """It waits itself for the requests to end, goes on with that when nobody listens any more, and loads nothing before."""
        limit_s = self._settings.load_timeout_s if wait_s is None else wait_s
        with anyio.fail_after(limit_s):
            try:
                await server.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=limit_s + 1)
            except BadRequestError:
                if name in await self.adapters(server):  # else it has gone meanwhile
                    raise


def _new(output_ids: list[int], meta: _Meta, num_before: int) -> tuple[list[int], list[float]]:
    """What is new in an event, whether the server tells that alone or all from the start.

    Raises:
        EngineUnavailableError: Ids and log-probs don't fit together.
    """
    num_new = meta.completion_tokens - num_before
    told = meta.output_token_logprobs
    if num_new < 0 or len(output_ids) < num_new or len(told) < num_new:
        raise EngineUnavailableError(
            f"expected {num_new} new tokens with log-probs, found {len(output_ids)} ids and {len(told)} log-probs"
        )
    ids = output_ids[len(output_ids) - num_new :]
    new = told[len(told) - num_new :]
    if [entry[1] for entry in new] != ids:
        raise EngineUnavailableError(
            f"expected log-probs of the ids {ids}, found those of {[entry[1] for entry in new]}"
        )
    return ids, finite([entry[0] for entry in new])
