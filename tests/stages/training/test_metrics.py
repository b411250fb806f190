"""What a step says about itself: throughput, the engine's mismatch, TensorBoard files."""

from collections.abc import Mapping

import numpy as np
import pytest
import structlog.testing
import torch
from backend_case import Case, policy_folder
from loop_case import RUN, publish_steps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_case import plan

from broker.connect import connect
from pipeline.log import RunLog, RunPayloads
from pipeline.metrics import Metrics
from stages.training.backends import plain_backend
from stages.training.loop import FollowerLease, LoopSettings, TrainerLoop
from stages.training.metric_sinks import TensorBoardSink
from stages.training.ranks import single_rank
from stages.training.step_backend import StepSettings
from stages.training.throughput import peak_flops, step_flops


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: dict[int, Mapping[str, float]] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.steps[step] = dict(values)

    def close(self) -> None:
        pass


async def trained(tmp_path, *, bound=0.0, sinks=()):
    policy_folder(tmp_path)
    settings = StepSettings(
        model_folder=str(tmp_path / "policy"), checkpoint_dir=str(tmp_path / "checkpoints"), peak_tflops=0.001
    )
    backend = plain_backend(settings, plan(97), single_rank())
    async with connect("memory://", RUN) as broker:
        await publish_steps(broker, Case(folder=str(tmp_path), last_step=2))
        loop = TrainerLoop(
            RunLog(broker),
            RunPayloads(broker),
            backend,
            FollowerLease(),
            Metrics(RUN, "trainer"),
            LoopSettings(
                weights_dir=str(tmp_path / "weights"), steps=2, checkpoint_every_steps=1, mismatch_kl_warning=bound
            ),
            sinks=sinks,
        )
        await loop.run()
    backend.close()


async def test_sinks_get_each_steps_statistics_with_throughput(tmp_path):
    kept = Kept()
    await trained(tmp_path, sinks=[kept])
    assert list(kept.steps) == [1, 2]
    found = kept.steps[2]
    assert {"loss", "grad_norm", "mismatch/kl", "perf/tokens_per_s", "perf/mfu"} <= found.keys()
    assert found["perf/mfu"] == pytest.approx(found["perf/tflops_per_s"] / 0.001)


async def test_an_engine_that_disagrees_is_told_above_the_bound_only(tmp_path):
    with structlog.testing.capture_logs() as lines:
        await trained(tmp_path, bound=1e-6)
    assert [line["step"] for line in lines if "log-probs differ" in line["event"]] == [1, 2]
    with structlog.testing.capture_logs() as lines:
        await trained(tmp_path / "again", bound=1e6)
    assert not [line for line in lines if "log-probs differ" in line["event"]]


def test_tensorboard_hides_what_a_former_incarnation_wrote_of_steps_that_come_again(tmp_path):
    for values in ({1: 0.5, 2: 0.6, 3: 0.7}, {2: 1.6, 3: 1.7}):
        sink = TensorBoardSink(tmp_path)
        for step, value in values.items():
            sink.write(step, {"loss": value})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.6), (3, 1.7)]


def test_flops_count_weights_attention_and_the_output_matrix_on_trained_tokens():
    shapes = {
        "model.embed_tokens.weight": [100, 8],
        "model.layers.0.mlp.up_proj.weight": [16, 8],
        "model.layers.0.input_layernorm.weight": [8],
    }
    found = step_flops(shapes, np.array([10, 20]), np.array([5, 5]), attention_width=8, num_layers=1)
    assert found == 6 * 16 * 8 * 30 + 6 * 100 * 8 * 10 + 6 * 8 * (100 + 400)


def test_a_peak_is_as_configured_or_not_known_on_a_cpu():
    assert peak_flops(torch.device("cpu"), 2.0) == 2e12
    assert peak_flops(torch.device("cpu")) is None
