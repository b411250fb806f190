"""The command line and the environment of an inference server. Pure: starts nothing, reads nothing.

One place knows the flags; what they are for stands beside them. Tested with vLLM 0.32.0 and SGLang 0.5.23 (docs/engines.md).
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

from schemas.config import EngineKind
from schemas.errors import ConfigError

SERVER_KINDS: Final = (EngineKind.VLLM, EngineKind.SGLANG)
_MIB: Final = 1024**2
ADAPTERS_AT_ONCE: Final = 4
"""LoRA adapters that a server computes with: the newest, and those that running requests began with."""
VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a server is started."""

    model: str
    """HF folder that is served at first."""
    port: int
    host: str = "127.0.0.1"
    """Where it listens; it has no login of its own unless `api_key` is given."""
    served_model_name: str = "policy"
    python: str = "python3"
    """Interpreter of the server's environment."""
    launcher: tuple[str, ...] = ()
    """Replaces `PYTHON -m MODULE`, e.g. ("vllm", "serve") or a container's command."""
    device: str = "cpu"
    """cpu | cuda."""
    gpu_ids: tuple[str, ...] = ()
    """Devices it may see (CUDA_VISIBLE_DEVICES); one of them per tensor-parallel rank."""
    dtype: str = "float32"
    max_context: int = 2048
    """Prompt and completion tokens of one request."""
    max_running_requests: int = 32
    kv_cache_bytes: int = 256 * _MIB
    """vLLM on CPU: size of the KV cache."""
    kv_cache_tokens: int = 16384
    """SGLang on CPU: tokens that the KV cache holds."""
    threads: int = 1
    """CPU threads (OMP_NUM_THREADS)."""
    stubs: str = ""
    """On CPUs: folder whose sub-folder `vllm` or `sglang` holds what the server lacks there (see cpu_environment); it is put on
    PYTHONPATH.
    """
    can_sleep: bool = False
    """It is to give up its memory while a trainer on the same accelerator computes."""
    adapter_rank: int = 0
    """Largest rank of the LoRA adapters that it is to take; 0: it takes none."""
    adapter_targets: tuple[str, ...] = ()
    """Last names of the matrices that adapters are for."""
    api_key: str = ""
    """Key that calls must bring. vLLM gets it in its environment, SGLang in `key_file`: command lines stand in every list of
    processes.
    """
    key_file: str = ""
    """SGLang with an `api_key`: a YAML file with `key_file_text`, readable by the owner only."""
    extra_args: tuple[str, ...] = ()
    """More arguments, at the end: later ones win."""
    extra_env: dict[str, str] = {}


def server_command(kind: EngineKind, settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
    """The arguments that start a server, and the environment variables to be set beside one's own.

    Raises:
        ConfigError: No server of this kind, or settings that contradict each other.
    """
    if settings.device not in ("cpu", "cuda"):
        raise ConfigError(f"device {settings.device!r}: expected cpu or cuda")
    if settings.device == "cpu" and settings.gpu_ids:
        raise ConfigError(f"gpu_ids {', '.join(settings.gpu_ids)}: expected none with device cpu")
    match kind:
        case EngineKind.VLLM:
            argv, env = _vllm(settings)
        case EngineKind.SGLANG:
            argv, env = _sglang(settings)
        case _:
            raise ConfigError(f"engine kind {kind}: expected one of {', '.join(SERVER_KINDS)}")
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(settings.threads), **env}
    if settings.stubs and settings.device == "cpu":
        env["PYTHONPATH"] = f"{settings.stubs}/{kind}"
    if settings.gpu_ids:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpu_ids)
    return [*argv, *settings.extra_args], {**env, **settings.extra_env}


def _vllm(settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
    argv = [
        *(settings.launcher or (settings.python, "-m", "vllm.entrypoints.openai.api_server")),
        *("--model", settings.model, "--served-model-name", settings.served_model_name),
        *("--host", settings.host, "--port", str(settings.port)),
        *("--dtype", settings.dtype, "--max-model-len", str(settings.max_context)),
        *("--max-num-seqs", str(settings.max_running_requests)),
        # log-probs at the request's temperature, not the raw ones
        *("--logprobs-mode", "processed_logprobs"),
        # opens the endpoints that take and give token ids
        "--enable-scale-out",
        # one line a call would be a line for each look at the version
        "--disable-uvicorn-access-log",
    ]
    if settings.device == "cpu":
        argv += ["--kv-cache-memory-bytes", str(settings.kv_cache_bytes), "--enforce-eager"]
        if settings.stubs:
            argv += ["--worker-extension-cls", "headrace_vllm.WholeReload"]
    if len(settings.gpu_ids) > 1:
        argv += ["--tensor-parallel-size", str(len(settings.gpu_ids))]
    if settings.can_sleep:
        argv.append("--enable-sleep-mode")
    # the development mode opens pause, reload and abort
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if settings.adapter_rank:
        rank = next((one for one in VLLM_RANKS if one >= settings.adapter_rank), None)
        if rank is None:
            raise ConfigError(
                f"training.lora.rank: vLLM takes adapters up to rank {VLLM_RANKS[-1]}, found {settings.adapter_rank}"
            )
        argv += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(ADAPTERS_AT_ONCE)]
        # twice as many are kept in memory: one whose requests wait is not driven out by newer ones: its files may be gone
        argv += ["--max-cpu-loras", str(2 * ADAPTERS_AT_ONCE)]
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if settings.device == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # each server by itself would bind to the first core, too
    if settings.api_key:
        env["VLLM_API_KEY"] = settings.api_key
    return argv, env


def _sglang(settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
    argv = [
        *(settings.launcher or (settings.python, "-m", "sglang.launch_server")),
        *("--model-path", settings.model, "--served-model-name", settings.served_model_name),
        *("--host", settings.host, "--port", str(settings.port)),
        *("--dtype", settings.dtype, "--context-length", str(settings.max_context)),
        *("--max-running-requests", str(settings.max_running_requests)),
        # a stream tells what is new, not all from the start each time
        "--incremental-streaming-output",
        *("--log-level-http", "warning"),
    ]
    env: dict[str, str] = {}
    if settings.device == "cpu":
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        argv += ["--max-total-tokens", str(settings.kv_cache_tokens)]
        # without the last it looks for work without a pause, and takes a core for it
        argv += ["--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle"]
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    if len(settings.gpu_ids) > 1:
        argv += ["--tp-size", str(len(settings.gpu_ids))]
    if settings.can_sleep:
        argv.append("--enable-memory-saver")
    if settings.adapter_rank:
        argv += ["--enable-lora", "--max-lora-rank", str(settings.adapter_rank)]
        argv += ["--lora-target-modules", *settings.adapter_targets]
        argv += ["--max-loras-per-batch", str(ADAPTERS_AT_ONCE + 1)]  # requests without one count, too
        if settings.device == "cpu":
            argv += ["--lora-backend", "torch_native"]  # the others are GPU kernels
    if settings.api_key:
        if not settings.key_file:
            raise ConfigError("SGLang's key: expected a file that holds it, found none")
        argv += ["--config", settings.key_file]
    return argv, env


def key_file_text(api_key: str) -> str:
    """What SGLang reads its key from."""
    return json.dumps({"api-key": api_key}) + "\n"
