"""The trainer beside a bare training loop: the same model, the same rows, in turn in one process.

The bare loop is what one writes by hand for rows of equal length: transformers' model and attention, a batch of whole rows,
log-softmax of the logits, the same clipped loss, clip, AdamW. The trainer does the same step out of a manifest, with packing,
statistics and the weights' digest. TRL's GRPOTrainer takes part where $HEADRACE_BENCH_TRL_PYTHON names a Python that has it, or
where one lies in headrace's cache (`trl/bin/python` in $HEADRACE_CACHE, else in ~/.cache/headrace).
The Megatron-Core backend takes part where headrace[megatron] is installed. Reads nothing of a run; needs torch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ops.bench.result import BenchResult, machine
from schemas import arrays
from schemas.messages.training import Manifest
from stages.assembly.partition import PartitionSettings, partition_manifest
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.training.backends import ModelSettings, hf_backend
from stages.training.determinism import set_determinism
from stages.training.fsdp2_placement import Fsdp2Placement, Fsdp2Settings, lone_group
from stages.training.placement import WholePlacement
from stages.training.ports import RowArrays
from stages.training.ranks import single_rank
from stages.training.step_backend import StepBackend, StepSettings

ROUNDS: Final = 5
NUM_ROWS: Final = 16
ROW_TOKENS: Final = 256
ROWS_A_BATCH: Final = 8
PROMPT_TOKENS: Final = 64
_SPEC: Final = PolicySpec(
    hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2, max_context=ROW_TOKENS
)


def run() -> BenchResult:
    """Tokens per second of a whole step: each backend with one rank, bare loop; ratios are medians of rounds in turn."""
    set_determinism(seed=0, threads=torch.get_num_threads())
    torch.use_deterministic_algorithms(mode=False)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as path, lone_group(), ExitStack() as opened:
        folder = Path(path)
        make_policy_folder(folder / "policy", _SPEC)
        manifest, rows = _step()
        contestants: dict[str, Callable[[], float]] = {
            "bare": _timed(_bare_loop(folder / "policy", rows)),
            "torch": _timed(_stepper(_backend(folder, fsdp2=False), manifest, rows)),
            "fsdp2": _timed(_stepper(_backend(folder, fsdp2=True), manifest, rows)),
        }
        if find_spec("megatron") is not None:
            contestants["megatron"] = _timed(_stepper(opened.enter_context(_megatron(folder)), manifest, rows))
        backends = [name for name in contestants if name != "bare"]
        ragged = _timed(_ragged(folder))
        with _trl(folder, manifest, rows) as trl:
            if trl is not None:
                contestants["trl"] = trl
            for once in (*contestants.values(), ragged):
                once()
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(ROUNDS):
                for name, once in contestants.items():
                    times[name].append(once())
        ragged_s = statistics.median(ragged() for _ in range(ROUNDS))
    tokens = NUM_ROWS * ROW_TOKENS
    rates = {name: round(tokens / statistics.median(seconds), 1) for name, seconds in times.items()}
    metrics: dict[str, float | str] = {f"{name}_tokens_per_s": rates[name] for name in backends}
    reference: dict[str, float | str] = dict.fromkeys(metrics, rates["bare"])
    ratio = {f"{name}_tokens_per_s": _ratio(times["bare"], times[name]) for name in backends}
    metrics["torch_ragged_tokens_per_s"] = round(_RAGGED_TOKENS / ragged_s, 1)
    if "trl" in times:
        metrics["torch_beside_trl_tokens_per_s"], reference["torch_beside_trl_tokens_per_s"] = (
            rates["torch"],
            rates["trl"],
        )
        ratio["torch_beside_trl_tokens_per_s"] = _ratio(times["trl"], times["torch"])
    return BenchResult(name="train", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


def _ratio(theirs_s: list[float], ours_s: list[float]) -> float:
    """Median over rounds of how much quicker ours is."""
    return round(statistics.median(theirs / ours for theirs, ours in zip(theirs_s, ours_s, strict=True)), 3)


def _timed(once: Callable[[], None]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        once()
        return time.perf_counter() - started

    return timed


@contextmanager
def _trl(folder: Path, manifest: Manifest, rows: dict[int, RowArrays]) -> Generator[Callable[[], float] | None]:
    """Seconds of one step of TRL's, in a process of its own; None where there is no TRL."""
    python = _trl_python()
    if not python:
        yield None
        return
    np.savez(
        folder / "rows.npz",
        tokens=np.stack([row.token_ids for row in rows.values()]),
        old=np.stack([row.logprobs[PROMPT_TOKENS:] for row in rows.values()]),
        advantages=manifest.advantage.as_numpy().astype(np.float32),
        prompt_size=PROMPT_TOKENS,
    )
    program = Path(__file__).with_name("train_trl.py")
    with subprocess.Popen(  # noqa: S603 - the interpreter that the user named
        [python, str(program), str(folder / "policy"), str(folder / "rows.npz"), str(ROWS_A_BATCH)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as process:
        if process.stdin is None or process.stdout is None or "ready" not in _line(process):
            process.kill()
            raise RuntimeError(
                f"{python} can't run TRL's GRPOTrainer (status {process.wait()}): its errors stand above"
            )

        def once() -> float:
            if process.stdin is not None:
                process.stdin.write("step\n")
                process.stdin.flush()
            return float(_line(process))

        yield once
        process.stdin.close()


def _trl_python() -> str:
    """The interpreter that has TRL; empty: none."""
    if named := os.environ.get("HEADRACE_BENCH_TRL_PYTHON", ""):
        return named
    cached = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace") / "trl" / "bin" / "python"
    return str(cached) if cached.exists() else ""


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that TRL's program says for us; libraries may print others before."""
    while process.stdout is not None and (line := process.stdout.readline()):
        if line.strip() == "ready" or line.strip().replace(".", "", 1).replace("e-", "", 1).isdigit():
            return line.strip()
    return ""


def _settings(folder: Path) -> StepSettings:
    return StepSettings(
        model_folder=str(folder / "policy"), checkpoint_dir=str(folder / "checkpoints"), async_checkpoints=False
    )


def _plan(manifest: Manifest, num_ranks: int) -> list[list[list[list[int]]]]:
    partition = PartitionSettings(max_tokens_per_microbatch=ROWS_A_BATCH * ROW_TOKENS)
    return partition_manifest(manifest, num_ranks, partition).ranks


def _backend(folder: Path, *, fsdp2: bool) -> StepBackend:
    ranks = single_rank()
    placement = Fsdp2Placement(ranks, Fsdp2Settings()) if fsdp2 else WholePlacement(ranks)
    return hf_backend(_settings(folder), ModelSettings(), _plan, ranks, placement)


@contextmanager
def _megatron(folder: Path) -> Generator[StepBackend]:
    from stages.training.megatron.backend import (  # noqa: PLC0415 - an extra of its own
        MegatronSettings,
        open_megatron_backend,
    )

    parallel = MegatronSettings()
    with open_megatron_backend(_settings(folder), ModelSettings(), _plan, single_rank(), parallel) as backend:
        yield backend


def _stepper(backend: StepBackend, manifest: Manifest, rows: dict[int, RowArrays]) -> Callable[[], None]:
    steps = iter(range(1, 1_000))

    def once() -> None:
        backend.train(msgspec.structs.replace(manifest, step=next(steps)), rows)

    return once


_RAGGED: Final = np.random.default_rng(1).integers(PROMPT_TOKENS + 2, ROW_TOKENS + 1, NUM_ROWS)
_RAGGED_TOKENS: Final = int(_RAGGED.sum())


def _ragged(folder: Path) -> Callable[[], None]:
    """Rows of any length: what padding would cost is not paid."""
    manifest, rows = _step([int(size) for size in _RAGGED])
    return _stepper(_backend(folder, fsdp2=False), manifest, rows)


def _step(sizes: list[int] | None = None) -> tuple[Manifest, dict[int, RowArrays]]:
    draw = np.random.default_rng(0)
    sizes = sizes or [ROW_TOKENS] * NUM_ROWS
    rows: dict[int, RowArrays] = {}
    for i, size in enumerate(sizes):
        mask = np.arange(size) >= PROMPT_TOKENS
        rows[i] = RowArrays(
            token_ids=draw.integers(0, 256, size).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -5.5, 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            turns=np.where(mask, 0, -1).astype(np.int32),
        )
    trained = [size - PROMPT_TOKENS for size in sizes]
    zeros = np.zeros(len(sizes))
    return (
        Manifest(
            run="bench",
            step=1,
            algorithm="grpo",
            aggregation="token_mean",
            temperature=1.0,
            groups=["g"],
            streams=["s"],
            row_ids=[f"row{i}" for i in range(len(sizes))],
            row_group=arrays.int32(zeros),
            row_slot=arrays.int32(np.arange(len(sizes))),
            row_stream=arrays.int32(zeros),
            reward=arrays.float64(zeros),
            advantage=arrays.float64(draw.normal(size=len(sizes))),
            loss_weight=arrays.float64(np.full(len(sizes), 1 / sum(trained))),
            mini_batch=arrays.int32(zeros),
            num_tokens=arrays.int32(sizes),
            num_loss_tokens=arrays.int32(trained),
            min_version=arrays.int32(zeros),
            max_version=arrays.int32(zeros),
            payload_ids=[""] * len(sizes),
            payload_sizes=arrays.int64(zeros),
            payload_store="memory",
        ),
        rows,
    )


def _bare_loop(folder: Path, rows: dict[int, RowArrays]) -> Callable[[], None]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    manifest, _ = _step()
    tokens = torch.from_numpy(np.stack([row.token_ids for row in rows.values()])).long()
    mask = torch.from_numpy(np.stack([row.loss_mask for row in rows.values()]))
    old = torch.from_numpy(np.stack([row.logprobs for row in rows.values()]))
    advantages = torch.from_numpy(manifest.advantage.as_numpy().astype(np.float32))[:, None]

    def once() -> None:
        for start in range(0, len(rows), ROWS_A_BATCH):
            part = slice(start, start + ROWS_A_BATCH)
            logits = model(input_ids=tokens[part], use_cache=False).logits[:, :-1]
            logp = logits.log_softmax(-1).gather(-1, tokens[part, 1:, None]).squeeze(-1)
            ratio = (logp - old[part, 1:]).exp()
            advantage = advantages[part]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            (loss * mask[part, 1:]).sum().div(mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return once
