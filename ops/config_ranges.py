"""What each number and each name of a config may be: one table, read by path. What several settings say together is `ops.config`'s.

A name tells its own rule where it can: `…_s` is above 0, `…port` a port, any other whole number at least 1, and every float finite.
The table holds the rest, and every float whose name says nothing.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from pipeline.logs import mask_text
from schemas.errors import ConfigError
from stages.assembly.partition import MicroBatchPacking, OverlongRows, RankBalance
from stages.training.trackers import TRACKERS


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Which numbers are allowed."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    may_be_infinite: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number is allowed."""
        return (
            (math.isfinite(value) or (self.may_be_infinite and not math.isnan(value)))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = (("at least", self.least), (">", self.above), ("at most", self.most), ("<", self.below))
        told = " and ".join(f"{word} {_plain(bound)}" for word, bound in bounds if bound is not None)
        is_open = not self.may_be_infinite and self.most is None and self.below is None
        return f"{told}, finite" if is_open and told else told or "a finite number"


_ANY: Final = Range()
_ABOVE_0: Final = Range(above=0)
_AT_LEAST_0: Final = Range(least=0)
_AT_LEAST_1: Final = Range(least=1)
_PORT: Final = Range(least=0, most=65535)
_SHARE: Final = Range(least=0, most=1)
_SHARE_ABOVE_0: Final = Range(above=0, most=1)
_SHARE_BELOW_1: Final = Range(least=0, below=1)

RANGES: Final[Mapping[str, Range]] = {
    "run.seed": _ANY,
    "run.min_free_disk_bytes": _AT_LEAST_0,
    "run.max_restarts": _AT_LEAST_0,
    "run.from_run_max_staleness": _AT_LEAST_0,
    "streams.sampling_weight": _ABOVE_0,
    "streams.reward_threshold": _ANY,
    "streams.evaluate_every_versions": _AT_LEAST_0,
    "broker.max_bytes": Range(least=2**20),
    "broker.max_payload_store_bytes": Range(least=2**20),
    "broker.replicas": Range(least=1, most=5),  # as NATS allows
    "arena.request_retries": _AT_LEAST_0,
    "arena.min_terminal_tasks": Range(least=0, most=100),  # of the last 100
    "arena.max_failure_rate": _SHARE,
    "arena.max_raw_bytes": _AT_LEAST_0,
    "sampling.max_staleness": _AT_LEAST_0,
    "sampling.epoch_size_groups": _AT_LEAST_0,
    "rollout.temperature": _ABOVE_0,
    "engine.count": _AT_LEAST_0,
    "engine.script_chunk_s": _AT_LEAST_0,
    "engine.script_load_s": _AT_LEAST_0,
    "engine.time_share_wait_s": _AT_LEAST_0,
    "reward.turn_discount": _SHARE,
    "assembly.max_staleness": _AT_LEAST_0,
    "assembly.reward_bias": _ANY,
    "assembly.reward_scale": _ANY,
    "assembly.reward_clip": _ABOVE_0,
    "assembly.min_accuracy": _SHARE,
    "assembly.max_accuracy": _SHARE,
    "assembly.aggregation_divisor": _ABOVE_0,
    "assembly.temperature": _ABOVE_0,
    "assembly.overlong.factor": _AT_LEAST_0,
    "assembly.length_penalty.output_tokens_weight": _ANY,
    "assembly.length_penalty.input_tokens_weight": _ANY,
    "assembly.length_penalty.turns_weight": _ANY,
    "assembly.reward_normalization.ddof": _AT_LEAST_0,
    "assembly.reward_normalization.eps": _AT_LEAST_0,
    "assembly.estimator.ddof": _AT_LEAST_0,
    "assembly.estimator.eps": _AT_LEAST_0,
    "assembly.stall.seconds": _AT_LEAST_0,
    "policy.seed": _ANY,
    "policy.warmup_target": Range(above=0, below=1),
    "policy.warmup_max_updates": _AT_LEAST_0,
    "training.learning_rate": _ABOVE_0,
    "training.total_steps": _AT_LEAST_0,
    "training.min_lr_ratio": _SHARE,
    "training.weight_decay": _AT_LEAST_0,
    "training.adam_beta1": _SHARE_BELOW_1,
    "training.adam_beta2": _SHARE_BELOW_1,
    "training.adam_eps": _AT_LEAST_0,
    "training.warmup_steps": _AT_LEAST_0,
    "training.max_grad_norm": Range(above=0, may_be_infinite=True),
    "training.keep_checkpoints_every_steps": _AT_LEAST_0,
    "training.mismatch_kl_warning": _AT_LEAST_0,
    "training.peak_tflops": _AT_LEAST_0,
    "training.hold_weights_s": _AT_LEAST_0,
    "training.standin_step_s": _AT_LEAST_0,
    "training.critic.learning_rate": _ABOVE_0,
    "training.critic.weight_decay": _AT_LEAST_0,
    "training.critic.max_grad_norm": Range(above=0, may_be_infinite=True),
    "training.critic.warmup_steps": _AT_LEAST_0,
    "training.critic.value_clip": _AT_LEAST_0,
    "training.critic.huber_delta": _ABOVE_0,
    "training.lora.alpha": _ABOVE_0,
    "training.lora.dropout": _SHARE_BELOW_1,
    "retention.purge_above": _SHARE_ABOVE_0,
    "retention.sampling_stops_at": _SHARE_ABOVE_0,
    "retention.sampling_resumes_at": _SHARE_ABOVE_0,
    "retention.min_payload_age_s": _AT_LEAST_0,
}

_DTYPES: Final = ("", "auto", "half", "float16", "bfloat16", "float", "float32")
NAMES: Final[Mapping[str, Sequence[str]]] = {
    "run.stage_processes": ("together", "apart"),
    "sampling.order": ("smallest_next", "quota"),
    "engine.swap": ("in_place", "recompute", "abort", "drain"),
    "engine.dtype": _DTYPES,
    "gateway.recording": ("strict", "fast"),
    "gateway.tool_format": ("hermes", "qwen3_coder", "none"),
    "gateway.tool_schemas": ("vllm", "sglang", "openai"),
    "gateway.asked_settings": ("override", "honour"),
    "reward.export": ("concat", "individual"),
    "reward.shared_tokens": ("first", "all"),
    "training.backend": ("torch", "fsdp2", "megatron", "standin"),
    "training.balance": tuple(RankBalance),
    "training.packing": tuple(MicroBatchPacking),
    "training.overlong_rows": tuple(OverlongRows),
    "training.trackers": TRACKERS,
}
"""What a text, or each of a list of texts, may be."""


def _is_web(url: str) -> bool:
    place = urlsplit(url)
    return place.scheme in ("http", "https") and bool(place.hostname)


def _is_broker(url: str) -> bool:
    places = [urlsplit(part.strip()) for part in url.split(",")]
    schemes = {place.scheme for place in places}
    if url == "embedded":
        return True
    return all(place.hostname for place in places) and (schemes <= {"nats", "tls"} or schemes <= {"amqp", "amqps"})


def _is_arena(url: str) -> bool:
    return url == "local" or (_is_web(url) and not url.rstrip("/").endswith("/openapi/v1"))


def _is_receipt(path: str) -> bool:
    return path.startswith("/") and "{task_id}" in path


def _is_import_path(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text) is not None


def _is_harness(text: str) -> bool:
    return re.fullmatch(r"[^@\s]+@[^@\s]+", text) is not None


class Form(NamedTuple):
    """What a text looks like."""

    fits: Callable[[str], bool]
    told: str
    may_be_empty: bool = True


FORMS: Final[Mapping[str, Form]] = {
    "broker.url": Form(
        _is_broker,
        "embedded, nats://host:port, tls://…, amqp://… or amqps://… (several, separated by commas)",
        may_be_empty=False,
    ),
    "arena.url": Form(_is_arena, "local, or http://host:port without /openapi/v1", may_be_empty=False),
    "arena.receipt_path": Form(_is_receipt, "a path such as /tasks/{task_id}/receipt, or none"),
    "arena.harness": Form(_is_harness, '"key@version", or none'),
    "gateway.public_url": Form(_is_web, "http://host:port, or none"),
    "gateway.preprocessors": Form(_is_import_path, "package.module:function", may_be_empty=False),
    "assembly.user_filters": Form(_is_import_path, "package.module:function", may_be_empty=False),
    "engine.script": Form(_is_import_path, "package.module:function"),
}


def check_values(section: msgspec.Struct, path: str) -> None:
    """Look at every number and text of a section and of those in it.

    Raises:
        ConfigError: the first that can't work; what it may be.
    """
    for where, value in _leaves(section, path):
        rule = re.sub(r"\[\d+\]", "", where)
        if isinstance(value, str):
            check_name(where, value, NAMES.get(rule))
            _check_form(where, value, FORMS.get(rule))
        elif not (allowed := range_of(rule, value)).holds(value):
            told = str(allowed) if isinstance(value, float) else str(allowed).removesuffix(", finite")
            raise ConfigError(f"{where}: expected {told}, found {_plain(value)}")


def range_of(path: str, value: float) -> Range:
    """What a number may be, by the table or by its name."""
    name = path.rpartition(".")[2]
    if path in RANGES:
        return RANGES[path]
    if name.endswith("_s"):
        return _ABOVE_0
    if name.endswith("port"):
        return _PORT
    if name == "ports":
        return Range(least=1, most=65535)
    return _AT_LEAST_1 if isinstance(value, int) else _ANY


def check_name(path: str, value: str, allowed: Sequence[str] | None) -> None:
    """Refuse what is none of the allowed names, with the one that was probably meant.

    Raises:
        ConfigError: it is none of them.
    """
    if allowed is None or value in allowed:
        return
    close = difflib.get_close_matches(value, allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"{path}: expected one of {', '.join(one or repr(one) for one in allowed)}, found {value!r}{hint}"
    )


def _check_form(where: str, value: str, form: Form | None) -> None:
    if form is None or (form.may_be_empty and not value) or (value and form.fits(value)):
        return
    raise ConfigError(f"{where}: expected {form.told}; found {mask_text(value)!r}")


def _leaves(section: msgspec.Struct, path: str) -> Iterator[tuple[str, float | str]]:
    """Every number and text below a section with its path; maps belong to others."""
    for name in section.__struct_fields__:
        yield from _leaves_of(getattr(section, name), f"{path}.{name}" if path else name)


def _leaves_of(value: Any, where: str) -> Iterator[tuple[str, float | str]]:  # Any: any setting
    match value:
        case bool():
            return
        case int() | float() | str():
            yield where, value
        case msgspec.Struct():
            yield from _leaves(value, where)
        case list() | tuple():
            for index, one in enumerate(cast(Sequence[Any], value)):  # cast: any settings
                yield from _leaves_of(one, f"{where}[{index}]")
        case _:
            return


def _plain(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)
