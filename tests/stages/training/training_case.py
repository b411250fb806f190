"""Manifests with rows for the trainer's tests: ragged, several turns a row, some rows without weight."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from schemas import arrays
from schemas.messages.training import Manifest
from stages.assembly.partition import PartitionSettings, partition_manifest
from stages.learning.losses.config import LossConfig
from stages.learning.update import OptimizerSettings
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.training.backends import plain_backend
from stages.training.determinism import set_determinism
from stages.training.ports import RowArrays
from stages.training.ranks import Ranks, process_group
from stages.training.step_backend import StepBackend, StepSettings

SPEC = PolicySpec(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, init_std=0.2, max_context=256
)


def step_of(
    number: int, *, num_rows: int = 14, mini_batches: int = 2, temperature: float = 1.0, longest: int = 60
) -> tuple[Manifest, dict[int, RowArrays]]:
    """A step with random rows: the same for the same number."""
    draw = np.random.default_rng(number)
    rows: dict[int, RowArrays] = {}
    for i in range(num_rows):
        size = int(draw.integers(4, longest))
        mask = draw.random(size) < 0.4
        mask[0] = False
        mask[-1] = True
        rows[i] = RowArrays(
            token_ids=draw.integers(0, 264, size).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -5.5 + 0.3 * draw.normal(size=size), np.nan).astype(np.float32),
            versions=np.where(mask, number - 1 - (i % 2), -1).astype(np.int32),
            turns=np.where(mask, np.arange(size) // 20, -1).astype(np.int32),
        )
    mini = np.arange(num_rows) % mini_batches
    d = np.array([int(row.loss_mask.sum()) for row in rows.values()])
    weight = np.array([1 / d[mini == mini[i]].sum() for i in range(num_rows)])
    manifest = Manifest(
        run="r",
        step=number,
        algorithm="grpo",
        aggregation="token_mean",
        temperature=temperature,
        groups=[f"g{i}" for i in range(num_rows // 2)],
        streams=["s"],
        row_ids=[f"row{i}" for i in range(num_rows)],
        row_group=arrays.int32(np.arange(num_rows) // 2),
        row_slot=arrays.int32(np.arange(num_rows) % 2),
        row_stream=arrays.int32(np.zeros(num_rows)),
        reward=arrays.float64(np.zeros(num_rows)),
        advantage=arrays.float64(draw.normal(size=num_rows)),
        loss_weight=arrays.float64(weight),
        mini_batch=arrays.int32(mini),
        num_tokens=arrays.int32([row.token_ids.size for row in rows.values()]),
        num_loss_tokens=arrays.int32(d),
        min_version=arrays.int32(np.zeros(num_rows)),
        max_version=arrays.int32(np.zeros(num_rows)),
        payload_ids=[""] * num_rows,
        payload_sizes=arrays.int64(np.zeros(num_rows)),
        payload_store="memory",
    )
    return manifest, rows


def plan(budget: int):
    """The real partition under a budget of tokens a micro-batch."""
    settings = PartitionSettings(max_tokens_per_microbatch=budget)
    return lambda manifest, num_ranks: partition_manifest(manifest, num_ranks, settings).ranks


OPTIMIZER = OptimizerSettings(lr=3e-3, weight_decay=0.01, max_grad_norm=0.5, warmup_updates=3)


def backend(folder: Path, ranks: Ranks, *, budget: int = 128, loss: LossConfig | None = None, **changes) -> StepBackend:
    """A backend over a tiny policy in `folder/policy`, made if it isn't there."""
    if ranks.rank == 0 and not (folder / "policy" / "config.json").exists():
        make_policy_folder(folder / "policy", SPEC)
    ranks.barrier()
    settings = StepSettings(
        model_folder=str(folder / "policy"),
        checkpoint_dir=str(folder / "checkpoints"),
        loss=loss or LossConfig(),
        async_checkpoints=False,
        **{"optimizer": OPTIMIZER, **changes},
    )
    return plain_backend(settings, plan(budget), ranks)


def main(folder: Path, last_step: int, num_rows: int) -> None:
    """One rank under torchrun: resume, train to `last_step`, checkpoint, export."""
    set_determinism(seed=0, threads=1)
    with process_group(timeout_s=60) as ranks:
        trainer = backend(folder, ranks, budget=97)
        for number in range(trainer.resume() + 1, last_step + 1):
            manifest, rows = step_of(number, num_rows=num_rows)
            trainer.train(manifest, {i: rows[i] for i in trainer.rows_needed(manifest)})
        trainer.save_checkpoint(last_step, 1)
        trainer.export_weights(str(folder / "exported"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
