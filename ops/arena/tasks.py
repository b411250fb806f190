"""Tasks of the local Arena: reasoning-gym's generators and verifiers, addressed by data id.

Knows no HTTP and no harness.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from ops.arena.config import ArenaConfigError, StreamSpec
from ops.arena.jobs import TaskTexts

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Dataset(Protocol):
    """What is needed of a reasoning-gym dataset."""

    def __getitem__(self, idx: int) -> dict[str, object]:
        """One entry: question, answer, metadata."""
        ...

    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float:
        """The dataset's own verdict, 0 to 1."""
        ...


class TaskSource:
    """The tasks of one stream."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.data_ids = [f"{spec.dataset}-{spec.seed}-{i:06d}" for i in range(spec.size)]
        self.domain = spec.domain or spec.dataset
        self.reward_key = spec.reward_key or spec.dataset
        self._index = {data_id: i for i, data_id in enumerate(self.data_ids)}
        self._dataset = _dataset(spec)
        self.texts(self.data_ids[0])  # a template that can't be filled is refused here, not at the first launch

    def __contains__(self, data_id: str) -> bool:
        return data_id in self._index

    def tags(self) -> list[str]:
        """Tags of each item of the dataset."""
        return [f"domain:{self.domain}", f"dataset:{self.spec.dataset}"]

    def texts(self, data_id: str) -> TaskTexts:
        """The task's texts, templates filled in but for `{reply}`.

        Raises:
            ArenaConfigError: A template names something that the dataset doesn't give.
        """
        entry = self._dataset[self._index[data_id]]
        metadata = entry.get("metadata")
        fields: dict[str, object] = {}
        if isinstance(metadata, Mapping):
            fields.update({str(name): value for name, value in metadata.items()})
        fields.update(question=entry["question"], reply="{reply}")
        try:
            turns = tuple(template.format_map(fields) for template in self.spec.turns)
        except (KeyError, IndexError, ValueError) as error:
            allowed = sorted(fields)
            raise ArenaConfigError(
                f"stream {self.spec.stream_id!r} turns: {error!r}; expected only names out of {allowed}"
            ) from error
        if self.spec.lowercase:
            turns = tuple(text.lower() for text in turns)
        return TaskTexts(turns=turns, answer=str(entry["answer"]))

    def score(self, data_id: str, reply: str) -> float:
        """The stream's verdict on a model's last reply."""
        entry = self._dataset[self._index[data_id]]
        value = float(self._dataset.score_answer(self.extracted(reply), entry))
        if self.spec.scorer == "exact":
            return float(value >= 1.0)
        return value

    def extracted(self, reply: str) -> str | None:
        """The part of a reply that is the answer."""
        match self.spec.extract:
            case "whole":
                return reply.strip()
            case "last_line":
                lines = reply.strip().splitlines()
                return lines[-1].strip() if lines else ""
            case "tag":
                found = _ANSWER_TAG.findall(reply)
                return found[-1].strip() if found else None


def _dataset(spec: StreamSpec) -> Dataset:
    try:
        import reasoning_gym  # noqa: PLC0415 - an optional package that takes a second to import
    except ImportError as error:
        text = f"stream {spec.stream_id!r} needs the package reasoning-gym: pip install 'headrace[arena]'"
        raise ArenaConfigError(text) from error
    try:
        return reasoning_gym.create_dataset(spec.dataset, size=spec.size, seed=spec.seed, **spec.dataset_options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ArenaConfigError(f"stream {spec.stream_id!r}: reasoning-gym refuses {spec.dataset!r}: {error}") from error
