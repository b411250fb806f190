"""What [training] must be, as far as that can be said without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ops.engines.commands import SERVER_KINDS, VLLM_RANKS
from schemas.config import EngineKind, EngineSection, TrainingSection
from schemas.errors import ConfigError

_DTYPES: Final = ("float32", "bfloat16")
_GAE: Final = "gae"


def check_training(training: TrainingSection, *, estimator: str, steps: int | None) -> None:
    """Refuse what can't work.

    Raises:
        ConfigError: the first such setting.
    """
    _one_of("training.dtype", training.dtype, _DTYPES)
    _one_of("training.export_dtype", training.export_dtype, ("", *_DTYPES))
    _one_of("training.fsdp2.compute_dtype", training.fsdp2.compute_dtype, _DTYPES)
    _one_of("training.fsdp2.reduce_dtype", training.fsdp2.reduce_dtype, _DTYPES)
    _one_of("training.schedule", training.schedule, ("constant", "linear", "cosine"))
    _one_of("training.critic.form", training.critic.form, ("mse", "huber"))
    _one_of("training.lora.publish", training.lora.publish, ("auto", "adapter", "merged"))
    for name, value, least in (
        ("keep_checkpoints_every_steps", training.keep_checkpoints_every_steps, 0),
        ("mismatch_kl_warning", training.mismatch_kl_warning, 0),
        ("peak_tflops", training.peak_tflops, 0),
        ("megatron.tensor_parallel", training.megatron.tensor_parallel, 1),
        ("megatron.pipeline_parallel", training.megatron.pipeline_parallel, 1),
        ("lora.rank", training.lora.rank, 1),
        ("critic.warmup_steps", training.critic.warmup_steps, 0),
        ("critic.value_clip", training.critic.value_clip, 0),
    ):
        if value < least:
            raise ConfigError(f"training.{name}: expected at least {least}, found {value}")
    for name, value in (
        ("checkpoint_timeout_s", training.checkpoint_timeout_s),
        ("start_timeout_s", training.start_timeout_s),
        ("node_silent_s", training.node_silent_s),
    ):
        if value <= 0:
            raise ConfigError(f"training.{name}: expected above 0, found {value:g}")
    if training.schedule != "constant" and training.total_steps <= training.warmup_steps:
        raise ConfigError(
            f"training.total_steps: schedule {training.schedule} expected more than warmup_steps ({training.warmup_steps}), "
            f"found {training.total_steps}" + (f"; the run has {steps} steps" if steps else "")
        )
    _check_combinations(training, estimator)


def publishes_adapter(training: TrainingSection, engine: EngineSection) -> bool:
    """Whether engines get the LoRA adapter alone: where they take one, or where that is asked for.

    Raises:
        ConfigError: it is asked for, and the engine takes none of that rank.
    """
    lora = training.lora
    if not lora.enabled or lora.publish == "merged" or engine.kind is EngineKind.SCRIPTED:
        return False
    if engine.kind is EngineKind.VLLM and lora.rank > VLLM_RANKS[-1]:
        if lora.publish == "adapter":
            raise ConfigError(
                f"training.lora.publish = adapter: vLLM takes adapters up to rank {VLLM_RANKS[-1]}, found training.lora.rank = "
                f"{lora.rank}; expected merged or auto"
            )
        return False
    # how attached servers were started is not known here
    return lora.publish == "adapter" or engine.kind not in SERVER_KINDS or not engine.urls


def _check_combinations(training: TrainingSection, estimator: str) -> None:
    backend, critic = training.backend, training.critic
    if backend == "standin":
        return
    if estimator == _GAE and not critic.enabled:
        raise ConfigError("assembly.estimator.name = gae needs a critic: set training.critic.enabled = true")
    if critic.enabled and estimator != _GAE:
        raise ConfigError(
            f"training.critic.enabled: only estimator gae uses a critic, assembly.estimator.name is {estimator}; set it to gae "
            "or leave the critic out"
        )
    tensor, pipeline = training.megatron.tensor_parallel, training.megatron.pipeline_parallel
    if backend != "megatron":
        for name, value in (("tensor_parallel", tensor), ("pipeline_parallel", pipeline)):
            if value > 1:
                raise ConfigError(f"training.megatron.{name}: expected backend = megatron, found {backend}")
        return
    if training.ranks % (tensor * pipeline):
        raise ConfigError(
            f"training.ranks: expected a multiple of megatron.tensor_parallel ({tensor}) · pipeline_parallel ({pipeline}), "
            f"found {training.ranks}"
        )
    if training.lora.enabled and training.lora.dropout and tensor > 1:
        raise ConfigError(
            f"training.lora.dropout: expected 0 where megatron.tensor_parallel is {tensor} (ranks that share a matrix would drop "
            f"different inputs), found {training.lora.dropout:g}"
        )


def _one_of(path: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        names = ", ".join(repr(name) for name in allowed)
        raise ConfigError(f"{path}: expected one of {names}, found {value!r}")
