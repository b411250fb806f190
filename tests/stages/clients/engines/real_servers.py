"""Real vLLM and SGLang servers on CPUs for tests, the weights that they serve, and transformers as the reference."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from adapter_folders import RANK
from peft import PeftModel
from torch import nn
from transformers import Qwen3ForCausalLM

from ops.engines.commands import ServerSettings, server_command
from ops.engines.cpu_environment import cpu_environment
from ops.engines.server_process import free_port, last_lines
from schemas.config import EngineKind
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.ports import TokenIds

MAX_CONTEXT = 2048
NUM_VERSIONS = 4
START_DEADLINE_S = 900
"""A minute on an idle machine."""
LEASH = Path(__file__).parents[4] / "ops" / "arena" / "leash.py"
SPEC = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "max_context": 4096,
    "init_std": 0.12,
}


def make_versions(root: Path) -> list[str]:
    """Folders of versions 0 … NUM_VERSIONS - 1."""
    folders = []
    for version in range(NUM_VERSIONS):
        make_policy_folder(root / f"v{version}", PolicySpec(**SPEC, seed=version))
        folders.append(str(root / f"v{version}"))
    return folders


@contextmanager
def real_server(
    kind: EngineKind, folder: str, log_file: Path, *extra_args: str, adapter_targets: tuple[str, ...] = ()
) -> Iterator[str]:
    """A server that is up: its address. Nothing of it is left afterwards.

    Args:
        adapter_targets: it takes LoRA adapters for these matrices.
    """
    environment = cpu_environment()
    port = free_port("127.0.0.1")
    argv, env = server_command(
        kind,
        ServerSettings(
            model=folder,
            port=port,
            python=environment.python,
            stubs=environment.stubs,
            max_context=MAX_CONTEXT,
            max_running_requests=8,
            adapter_rank=RANK if adapter_targets else 0,
            adapter_targets=adapter_targets,
            extra_args=extra_args,
        ),
    )
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with log_file.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(LEASH), str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**inherited, **env},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(kind, url, process, log_file)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def wait_until_up(kind: EngineKind, url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    path = "/health" if kind is EngineKind.VLLM else "/ready"
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{kind} ended at its start: {last_lines(log_file, 10)}"
        try:
            with urllib.request.urlopen(url + path, timeout=5) as answer:  # noqa: S310 - loopback
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(f"{kind} was not up after {START_DEADLINE_S} s: {last_lines(log_file, 10)}")


@lru_cache(maxsize=8)
def reference(folder: str) -> nn.Module:
    """A model folder's model, or what peft makes of an adapter's folder and the model that it is for."""
    config = Path(folder) / "adapter_config.json"
    if config.exists():
        base = json.loads(config.read_text())["base_model_name_or_path"]
        model = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(model, folder).eval()
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy_ids(folder: str, prompt: TokenIds, count: int) -> list[int]:
    """What transformers samples greedily."""
    ids = torch.tensor(prompt, dtype=torch.long)[None]
    for _ in range(count):
        ids = torch.cat([ids, reference(folder)(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@torch.inference_mode()
def logprobs(folder: str, prompt: TokenIds, completion: TokenIds, temperature: float) -> np.ndarray:
    """[C] float32: what transformers says of a completion."""
    ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)[None]
    logits = reference(folder)(ids).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
    scores = torch.log_softmax(logits.float(), dim=-1)
    return scores.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
