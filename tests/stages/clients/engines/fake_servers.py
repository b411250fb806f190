"""What vLLM and SGLang say over HTTP, without a model: for faults that real servers can't be asked for.

Tokens count up from the last id of the prompt; each has the log-prob -0.5. Their words are those of vLLM 0.32.0 and SGLang 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
from aiohttp import web

from schemas.config import EngineKind

VOCAB_SIZE = 264
MAX_CONTEXT = 256
LOGPROB = -0.5


class Running:
    """One request at the server."""

    def __init__(self, prompt: list[int], params: dict, cache_salt: str, adapter: str = ""):
        self.prompt = prompt
        self.adapter = adapter
        self.params = params
        self.cache_salt = cache_salt
        self.ids: list[int] = []
        self.spans: list[list] = []
        """[version label, start, end]"""
        self.aborted = False


class FakeServer:
    """The state of one server, and the faults it is told to have."""

    def __init__(self, kind: EngineKind, folder: str):
        self.kind = kind
        self.folder = folder
        self.running: dict[str, Running] = {}
        self.label = "default"
        self.go = anyio.Event()
        self.go.set()
        self.holding_new = False
        self.calls: list[str] = []
        """Path and query of every call but those for versions."""
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.num_generated = 0
        self.token_gate: anyio.Semaphore | None = None
        """With it, each token takes one permit."""
        self.cumulative = False
        """SGLang without --incremental-streaming-output."""
        self.fault = ""
        """broken | unfinished | garbage | nan | error_in_stream | error_500 | torn_event: of streams, after `fault_after` tokens."""
        self.fault_after = 3
        self.failing_paths: dict[str, int] = {}
        """Path → status that it answers with from now on, once."""
        self.dying_paths: set[str] = set()
        """Paths whose call closes the connection without an answer."""
        self.loaded: list[str] = []
        self.device = "cpu"
        self.worker_extension = "headrace_vllm.WholeReload"
        self.reload_methods: list[str] = []
        self.max_adapters = 0
        """That it computes with at once; 0: it was started without LoRA."""
        self.max_rank = 16
        self.targets: list[str] = []
        """SGLang's --lora-target-modules."""
        self.adapters: dict[str, str] = {}
        """Name → folder."""
        self.poisoned: set[str] = set()
        """Names whose log-probs are no numbers; "next": of the adapter that is loaded next."""

    # -- HTTP

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._faults])
        post, get = app.router.add_post, app.router.add_get
        if self.kind is EngineKind.VLLM:
            post("/inference/v1/generate", self._generate)
            post("/pause", self._vllm_pause)
            post("/resume", self._resume)
            post("/abort_requests", self._vllm_abort)
            post("/collective_rpc", self._vllm_reload)
            post("/update_weight_version", self._vllm_label)
            post("/reset_prefix_cache", self._vllm_reset)
            get("/weight_info", self._says(lambda: {"weight_version": self.label}))
            get("/server_info", self._says(self._vllm_config))
            get("/metrics", self._vllm_metrics)
            post("/v1/load_lora_adapter", self._load_adapter)
            post("/v1/unload_lora_adapter", self._unload_adapter)
        else:
            post("/generate", self._generate)
            post("/pause_generation", self._sglang_pause)
            post("/continue_generation", self._resume)
            post("/abort_request", self._sglang_abort)
            post("/flush_cache", self._sglang_flush)
            post("/update_weights_from_disk", self._sglang_update)
            get("/model_info", self._says(lambda: {"model_path": self.folder, "weight_version": self.label}))
            post("/update_weight_version", self._vllm_label)
            post("/load_lora_adapter", self._load_adapter)
            post("/unload_lora_adapter", self._unload_adapter)
            get("/server_info", self._says(self._sglang_config))
            get("/v1/loads", self._says(lambda: {"loads": [{"num_running_reqs": len(self.running)}]}))
        get("/v1/models", self._models)
        return app

    @staticmethod
    def _says(what: Callable[[], dict]):
        async def handler(_: web.Request) -> web.Response:
            return web.json_response(what())

        return handler

    @web.middleware
    async def _faults(self, request: web.Request, handler):
        path = request.path
        self.headers.append(dict(request.headers))
        if path not in ("/weight_info", "/model_info", "/metrics", "/v1/loads"):
            self.calls.append(request.path_qs)
        if path in self.dying_paths:
            request.transport.close()
            return web.Response()
        if path in self.failing_paths:
            return web.json_response({"error": {"message": "told to fail"}}, status=self.failing_paths.pop(path))
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fault == "error_500":
            return web.json_response({"error": {"message": "the engine is dead"}}, status=500)
        if self.kind is EngineKind.VLLM:
            server_id, prompt = "generate-tokens-" + body["request_id"], body["token_ids"]
            adapter = "" if body["model"] == "policy" else body["model"]
        else:
            server_id, prompt = body["rid"], body["input_ids"]
            adapter = body.get("lora_path", "")
        if adapter and adapter not in self.adapters:
            return web.json_response({"error": {"message": f"no {adapter}"}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        one = self.running[server_id] = Running(prompt, body["sampling_params"], body["cache_salt"], adapter)
        try:
            async for event in self._events(one):
                if event == b"":
                    request.transport.close()
                    return response
                await response.write(event)
            await response.write(b"data: [DONE]\n\n")
        finally:
            del self.running[server_id]
        return response

    async def _events(self, one: Running) -> AsyncIterator[bytes]:
        limit = one.params.get("max_tokens") or one.params.get("max_new_tokens")
        stops = one.params.get("stop_token_ids") or ()
        while True:
            if self.token_gate is not None:
                await self.token_gate.acquire()
            await self.go.wait()
            if one.aborted:
                yield self._event(one, 0, "abort", None)
                return
            if self.fault not in ("", "nan") and len(one.ids) == self.fault_after:
                if self.fault == "broken":
                    yield b""
                elif self.fault == "torn_event":
                    yield self._event(one, 0, None, None)[:20]
                    yield b""
                elif self.fault == "garbage":
                    yield b"data: <html>502</html>\n\n"
                elif self.fault == "error_in_stream":
                    yield b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
                return
            token = ((one.ids or one.prompt)[-1] + 1) % VOCAB_SIZE
            one.ids.append(token)
            self.num_generated += 1
            if not one.spans or one.spans[-1][0] != self.label:
                one.spans.append([self.label, len(one.ids) - 1, len(one.ids)])
            one.spans[-1][2] = len(one.ids)
            if token in stops:
                yield self._event(one, 1, "stop", token)
                return
            if len(one.ids) == limit:
                yield self._event(one, 1, "length", None)
                return
            yield self._event(one, 1, None, None)
            await anyio.lowlevel.checkpoint()

    def _event(self, one: Running, num_new: int, finish: str | None, matched: int | None) -> bytes:
        logprob: float | None = LOGPROB
        if (self.fault == "nan" and len(one.ids) > self.fault_after) or one.adapter in self.poisoned:
            logprob = -9999.0 if self.kind is EngineKind.VLLM else None
        new = one.ids[len(one.ids) - num_new :]
        spans = [{"version": v, "start": s, "end": e} for v, s, e in one.spans] if finish else None
        if self.kind is EngineKind.VLLM:
            choice = {
                "index": 0,
                "token_ids": new,
                "logprobs": {"content": [{"token_id": i, "logprob": logprob, "top_logprobs": []} for i in new]},
                "finish_reason": finish,
                "stop_reason": matched,
                "weight_versions": spans,
            }
            return f"data: {json.dumps({'request_id': 'x', 'choices': [choice]})}\n\n".encode()
        told = one.ids if self.cumulative else new
        meta = {
            "completion_tokens": len(one.ids),
            "weight_version": self.label,
            "finish_reason": finish and {"type": finish, "matched": matched},
            "output_token_logprobs": [[logprob, i, None] for i in told],
        }
        if finish:
            meta["weight_versions"] = spans
        return f"data: {json.dumps({'text': '', 'output_ids': told, 'meta_info': meta})}\n\n".encode()

    # -- control

    def _abort(self, begins: str | None, *, exact: bool) -> None:
        for server_id, one in self.running.items():
            if begins is None or server_id == begins or (not exact and server_id.startswith(begins)):
                one.aborted = True
        if self.token_gate is not None:
            for _ in range(len(self.running)):
                self.token_gate.release()

    async def _resume(self, _: web.Request) -> web.Response:
        self.go.set()
        return web.json_response({})

    async def _drained(self) -> None:
        while self.running:
            await anyio.sleep(0.005)

    async def _vllm_pause(self, request: web.Request) -> web.Response:
        match request.query["mode"]:
            case "keep":
                self.go = anyio.Event()
            case "abort":
                self._abort(None, exact=True)
                await self._drained()
            case "wait":
                await self._drained()
        return web.json_response({"status": "paused"})

    async def _vllm_abort(self, request: web.Request) -> web.Response:
        ids = (await request.json())["request_ids"]
        for one in ids or [None]:
            self._abort(one, exact=True)
        return web.json_response({"status": "aborted"})

    async def _vllm_reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.reload_methods.append(body["method"])
        self.loaded.append(body["kwargs"]["weights_path"])
        return web.json_response({"results": [None]})

    def _vllm_config(self) -> dict:
        parallel = {"worker_extension_cls": self.worker_extension}
        lora = {
            "max_lora_rank": self.max_rank,
            "max_loras": self.max_adapters,
            "max_cpu_loras": 2 * self.max_adapters,
        }
        return {
            "vllm_config": {
                "parallel_config": parallel,
                "device_config": {"device": self.device},
                "lora_config": lora if self.max_adapters else None,
            }
        }

    def _sglang_config(self) -> dict:
        lora = {
            "enable_lora": bool(self.max_adapters) or None,
            "max_lora_rank": self.max_rank,
            "max_loras_per_batch": self.max_adapters + 1,
            "lora_target_modules": self.targets or None,
        }
        return {"context_length": MAX_CONTEXT + 2, **lora}

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.adapters[body["lora_name"]] = body["lora_path"]
        if "next" in self.poisoned:
            self.poisoned = {body["lora_name"]}
        return web.json_response({"success": True})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        """vLLM forgets the name at once; SGLang waits for the requests that run with it, whoever listens."""
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            status = 404 if self.kind is EngineKind.VLLM else 400
            return web.json_response({"error": {"message": f"no {name}"}}, status=status)
        while self.kind is EngineKind.SGLANG and any(one.adapter == name for one in self.running.values()):
            await anyio.sleep(0.005)
        return web.json_response({"success": True})

    async def _vllm_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _vllm_reset(self, request: web.Request) -> web.Response:
        return web.json_response({"success": request.query["reset_running_requests"] == "true" or not self.running})

    async def _vllm_metrics(self, _: web.Request) -> web.Response:
        names = ",".join(sorted({one.adapter for one in self.running.values()} - {""}))
        told = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="%s",waiting_lora_adapters=""} %s'
        return web.Response(
            text=f'# HELP\nvllm:num_requests_running{{engine="0"}} {len(self.running)}.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            f"{told % ('lora-1-gone', '1.796e+09')}\n{told % (names, '1.797e+09')}\n"
        )

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": "policy", "root": self.folder, "parent": None, "max_model_len": MAX_CONTEXT}
        adapters = [
            {"id": name, "root": folder, "parent": "policy", "max_model_len": None}
            for name, folder in self.adapters.items()
        ]
        return web.json_response({"data": [base, *adapters]})

    async def _sglang_pause(self, request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        if mode == "abort":
            self._abort(None, exact=True)
            await self._drained()
        else:
            self.go = anyio.Event()
        return web.json_response({})

    async def _sglang_abort(self, request: web.Request) -> web.Response:
        self._abort((await request.json())["rid"], exact=False)
        return web.Response()

    async def _sglang_flush(self, _: web.Request) -> web.Response:
        return web.Response(text="Flush cache", status=400 if self.running else 200)

    async def _sglang_update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.loaded.append(body["model_path"])
        self.label = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})


@asynccontextmanager
async def serving(fake: FakeServer) -> AsyncGenerator[str]:
    """The address of a fake server while the block runs."""
    runner = web.AppRunner(fake.app(), handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        fake.go.set()
        await runner.cleanup()
