"""How much memory a step needs for rows of given lengths, as a program of its own: prints JSON.

    python tests/stages/training/long_row.py [--recompute] LENGTH [LENGTH ...]

Measured is the peak of the process's resident memory during the second step (the first makes the optimizer's state) above what it was
before the model was read. Computed is what the step can't do without, in float32:

    parameters · 4            weights, gradients, two moments
    per token and layer       6·D + 5·A + 4·B + 4·I       what the backward pass needs of a block
                              D hidden, A query heads · size, B key heads · size, I the MLP's width:
                              two norms (input, normalised, output), q (raw, normalised, rotated), attention's output and its copy for the
                              next matrix, k (the same three) and v, the MLP's gate, its activation, up, and their product
    per token                 4·D                         last norm (three), the states that predict trained tokens
    with recomputed activations: D per token and layer, and one block's

Not in it: the chunk of logits, gradients of activations, torch's own buffers. Whole logits would be tokens · vocabulary · 4 more, 4.3 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3]))

from schemas import arrays
from schemas.messages.training import Manifest
from stages.training.backends import ModelSettings, hf_backend
from stages.training.determinism import set_determinism
from stages.training.placement import WholePlacement
from stages.training.ports import RowArrays
from stages.training.ranks import single_rank
from stages.training.step_backend import StepSettings

VOCABULARY = 32 * 1024
SHAPE = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64 * 1024,
    tie_word_embeddings=True,
    dtype="float32",
)


def computed_bytes(num_parameters: int, num_tokens: int, *, recompute: bool) -> int:
    """See the module."""
    d, layers, inner = SHAPE.hidden_size, SHAPE.num_hidden_layers, SHAPE.intermediate_size
    a, b = SHAPE.num_attention_heads * SHAPE.head_dim, SHAPE.num_key_value_heads * SHAPE.head_dim
    block = 6 * d + 5 * a + 4 * b + 4 * inner
    blocks = layers * d + block if recompute else layers * block
    return 4 * (4 * num_parameters + num_tokens * (blocks + 4 * d))


def step(number: int, lengths: list[int]) -> tuple[Manifest, dict[int, RowArrays]]:
    draw = np.random.default_rng(number)
    rows = {}
    for i, size in enumerate(lengths):
        mask = np.arange(size) > 0
        rows[i] = RowArrays(
            token_ids=draw.integers(0, VOCABULARY, size).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -10.4, 0).astype(np.float32),
            versions=np.where(mask, number - 1, -1).astype(np.int32),
            turns=np.where(mask, 0, -1).astype(np.int32),
        )
    zeros, trained = np.zeros(len(lengths)), [size - 1 for size in lengths]
    return Manifest(
        run="long",
        step=number,
        algorithm="grpo",
        aggregation="token_mean",
        temperature=1.0,
        groups=["g"],
        streams=["s"],
        row_ids=[str(i) for i in rows],
        row_group=arrays.int32(zeros),
        row_slot=arrays.int32(np.arange(len(lengths))),
        row_stream=arrays.int32(zeros),
        reward=arrays.float64(zeros),
        advantage=arrays.float64(draw.normal(size=len(lengths))),
        loss_weight=arrays.float64(zeros + 1 / sum(trained)),
        mini_batch=arrays.int32(zeros),
        num_tokens=arrays.int32(lengths),
        num_loss_tokens=arrays.int32(trained),
        min_version=arrays.int32(zeros),
        max_version=arrays.int32(zeros),
        payload_ids=[""] * len(lengths),
        payload_sizes=arrays.int64(zeros),
        payload_store="memory",
    ), rows


def peak_bytes() -> int:
    """Of the resident memory since the last `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected VmHWM in /proc/self/status; this needs Linux")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(lengths: list[int], *, recompute: bool) -> dict[str, float]:
    set_determinism(seed=0, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(SHAPE).save_pretrained(f"{folder}/policy")
        step(1, lengths)
        before = psutil.Process(os.getpid()).memory_info().rss
        ranks = single_rank()
        backend = hf_backend(
            StepSettings(
                model_folder=f"{folder}/policy", checkpoint_dir=f"{folder}/checkpoints", async_checkpoints=False
            ),
            ModelSettings(activation_checkpointing=recompute),
            lambda manifest, _ranks: [[[list(range(len(manifest.row_ids)))]]],
            ranks,
            WholePlacement(ranks),
        )
        num_parameters = sum(p.numel() for p in backend._policy.network.parameters())
        backend.train(*step(1, [64]))
        forget_peak()
        started = time.perf_counter()
        result = backend.train(*step(2, lengths))
        seconds = time.perf_counter() - started
        measured = peak_bytes() - before
    computed = computed_bytes(num_parameters, sum(lengths), recompute=recompute)
    return {
        "tokens": sum(lengths),
        "parameters": num_parameters,
        "computed_mb": round(computed / 1e6, 1),
        "measured_mb": round(measured / 1e6, 1),
        "ratio": round(measured / computed, 3),
        "grad_norm": result.stats["grad_norm"],
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("lengths", nargs="+", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(main(options.lengths, recompute=options.recompute)) + "\n")
