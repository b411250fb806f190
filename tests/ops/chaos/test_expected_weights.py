from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from ops.chaos.weights import ExpectedWeights
from schemas import arrays
from schemas.messages.rollout import RowTokens
from schemas.messages.training import Manifest
from stages.training.loop import row_arrays
from stages.training.standin import StandInBackend


def _row(seed: int) -> bytes:
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 40))
    return msgspec.msgpack.encode(
        RowTokens(
            token_ids=arrays.int32(random.integers(0, 500, length)),
            loss_mask=arrays.bits(random.random(length) < 0.5),
            logprobs=arrays.float32(np.zeros(length)),
            versions=arrays.runs(np.zeros(length, dtype=np.int32)),
            turns=arrays.runs(np.zeros(length, dtype=np.int32)),
        )
    )


def _manifest(step: int, rows: list[bytes]) -> Manifest:
    count = len(rows)
    zeros = arrays.int32(np.zeros(count))
    numbers = np.random.default_rng(step).normal(size=(2, count))
    return Manifest(
        run="r", step=step, algorithm="grpo", aggregation="token_mean", temperature=1.0, groups=["g"], streams=["s"],
        row_ids=[f"g/{number}/0" for number in range(count)], row_group=zeros, row_slot=zeros, row_stream=zeros,
        reward=arrays.float64(np.zeros(count)), advantage=arrays.float64(numbers[0]), loss_weight=arrays.float64(numbers[1]),
        mini_batch=zeros, num_tokens=zeros, num_loss_tokens=zeros, min_version=zeros, max_version=zeros,
        payload_ids=[""] * count, payload_sizes=arrays.int64(np.zeros(count)), payload_store="run",
    )  # fmt: skip


@pytest.mark.parametrize("order", [[1, 2, 3], [1, 3, 2], [1, 2, 2, 3]])
def test_the_digest_is_the_trainer_s_own_and_shows_steps_out_of_order_or_twice(
    tmp_path: Path, order: list[int]
) -> None:
    backend, expected = StandInBackend(str(tmp_path)), ExpectedWeights()
    trained = applied = ""
    for step in order:
        rows = [_row(10 * step + number) for number in range(4)]
        manifest = _manifest(step, rows)
        trained = backend.train(manifest, dict(enumerate(row_arrays(memoryview(row)) for row in rows))).digest
    for step in (1, 2, 3):
        rows = [_row(10 * step + number) for number in range(4)]
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(_manifest(step, rows)))
        applied = expected.apply(plain, [msgspec.msgpack.decode(row) for row in rows])
    assert (trained == applied) is (order == [1, 2, 3])
