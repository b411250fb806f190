"""TRL's part of `headrace bench train`: a program of its own, so that TRL may live in another environment.

    PYTHON ops/bench/train_trl.py MODEL_FOLDER ROWS.npz ROWS_A_BATCH

Says "ready", then for each line on its input makes one step (GRPOTrainer's loss over the rows, clip, AdamW) and says how many
seconds it took. Imports nothing of headrace.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch


def _no_reward(completions: list[str], **_columns: object) -> list[float]:
    """TRL wants a reward; its step is timed on given advantages."""
    return [0.0] * len(completions)


def main(folder: str, rows_file: str, rows_a_batch: int) -> None:
    """Serve steps until the input ends."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports] # noqa: PLC0415 - another environment's
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports] # noqa: PLC0415 - same

    rows = np.load(rows_file)
    size = int(rows["prompt_size"])
    tokens = torch.from_numpy(rows["tokens"]).long()
    prompt, completion = tokens[:, :size], tokens[:, size:]
    old, advantages = torch.from_numpy(rows["old"]), torch.from_numpy(rows["advantages"])
    with tempfile.TemporaryDirectory(prefix="headrace-bench-trl-") as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            report_to=[],
            beta=0.0,
            per_device_train_batch_size=rows_a_batch,
            num_generations=rows_a_batch,
            gradient_checkpointing=False,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer: Any = GRPOTrainer(  # another environment's: untyped here
            model=folder,
            reward_funcs=_no_reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}]),
        )
        model = trainer.model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        trainer.current_gradient_accumulation_steps = len(tokens) // rows_a_batch

        def once() -> None:
            for start in range(0, len(tokens), rows_a_batch):
                part = slice(start, start + rows_a_batch)
                inputs = {
                    "prompt_ids": prompt[part],
                    "prompt_mask": torch.ones_like(prompt[part]),
                    "completion_ids": completion[part],
                    "completion_mask": torch.ones_like(completion[part]),
                    "old_per_token_logps": old[part],
                    "advantages": advantages[part],
                    "num_items_in_batch": torch.tensor(float(completion.numel())),
                }
                trainer.compute_loss(model, inputs).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        once()
        _say("ready")
        for _ in sys.stdin:
            started = time.perf_counter()
            once()
            _say(f"{time.perf_counter() - started}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
