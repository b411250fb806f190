"""How long each part of an episode's way to a step takes, and how many tokens pass in a second: from the times of the log.

request ─▶ launch ─▶ accept ─▶ end ─▶ trajectory ─▶ group closed ─▶ step assembled ─▶ step trained
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec
import numpy as np

from ops.report.figures import Hop, Rate
from pipeline.generations import Generations
from schemas.messages.rollout import EpisodeAccepted, EpisodeEnded, EpisodeLaunched, Trajectory
from schemas.messages.sampling import EpisodeRequested, GroupClosed
from schemas.messages.training import StepAssembled, StepTrained

_MEANINGS: Final = {
    "request → launch": "waits for a place at the Arena",
    "launch → accept": "the Arena's answer",
    "accept → end": "the episode itself",
    "end → trajectory": "reward mapping",
    "first trajectory → group closed": "waits for the group's other slots",
    "group closed → step": "waits for the step's other groups",
    "step assembled → trained": "waits for the trainer, and the update",
    "trained → next assembled": "the trainer waits for a step",
}
_SPANS: Final = 60
_LEAST_SPANS: Final = 8


class HopTimes:
    """Durations by hop; of what is under way only its last time is kept."""

    def __init__(self) -> None:
        self._seconds: Final[dict[str, array[float]]] = {name: array("d") for name in _MEANINGS}
        self._episodes: Final[dict[tuple[str, int], float]] = {}
        self._groups: Final[dict[str, float]] = {}
        self._closed: Final[dict[str, float]] = {}
        self._assembled: Final[dict[int, float]] = {}
        self._trained: Final[dict[int, float]] = {}
        self._generations: Final = Generations()

    def take(self, message: msgspec.Struct, time_s: float) -> None:
        """One message of the log."""
        match message:
            case EpisodeRequested():
                self._episodes[message.group, message.slot] = time_s
            case EpisodeLaunched():
                self._episode("request → launch", message.group, message.slot, time_s)
            case EpisodeAccepted():
                self._episode("launch → accept", message.group, message.slot, time_s)
            case EpisodeEnded():
                self._episode("accept → end", message.group, message.slot, time_s)
            case Trajectory():
                self._episode("end → trajectory", message.group, message.slot, time_s)
                self._episodes.pop((message.group, message.slot), None)
                self._groups.setdefault(message.group, time_s)
            case GroupClosed():
                self._add("first trajectory → group closed", self._groups.pop(message.group, None), time_s)
                if message.usable:
                    self._closed[message.group] = time_s
            case StepAssembled():
                for group in message.groups:
                    self._add("group closed → step", self._closed.pop(group, None), time_s)
                for dropped in message.dropped:
                    self._closed.pop(dropped.group, None)
                self._assembled.setdefault(message.step, time_s)
            case StepTrained() if self._generations.admits(message.generation):
                self._add("step assembled → trained", self._assembled.get(message.step), time_s)
                self._trained.setdefault(message.step, time_s)
            case _:
                pass

    def _episode(self, hop: str, group: str, slot: int, time_s: float) -> None:
        self._add(hop, self._episodes.get((group, slot)), time_s)
        self._episodes[group, slot] = time_s

    def _add(self, hop: str, since_s: float | None, time_s: float) -> None:
        if since_s is not None:
            self._seconds[hop].append(max(0.0, time_s - since_s))

    def result(self) -> list[Hop]:
        """Hops that were taken at least once."""
        for step, time_s in self._trained.items():
            if (following := self._assembled.get(step + 1)) is not None:
                self._add("trained → next assembled", time_s, following)
        hops: list[Hop] = []
        for name, seconds in self._seconds.items():
            if not seconds:
                continue
            median, p95 = np.percentile(np.frombuffer(seconds), (50, 95)).tolist()
            hops.append(
                Hop(
                    name=name,
                    meaning=_MEANINGS[name],
                    count=len(seconds),
                    median_s=median,
                    p95_s=p95,
                    max_s=max(seconds),
                )
            )
        return hops


class Throughput:
    """Tokens with the time when they were known: sampled ones at their trajectory, trained ones at their step."""

    def __init__(self) -> None:
        self._sampled: Final[tuple[array[float], array[int]]] = (array("d"), array("q"))
        self._trained: Final[tuple[array[float], array[int]]] = (array("d"), array("q"))

    def sampled(self, time_s: float, num_tokens: int) -> None:
        """A trajectory's completions."""
        self._sampled[0].append(time_s)
        self._sampled[1].append(num_tokens)

    def trained(self, time_s: float, num_tokens: int) -> None:
        """A step's rows."""
        self._trained[0].append(time_s)
        self._trained[1].append(num_tokens)

    def result(self, first_s: float, last_s: float) -> list[Rate]:
        """Rates over at most 60 spans of the run."""
        length_s = last_s - first_s
        if length_s <= 0:
            return []
        spans = min(_SPANS, max(_LEAST_SPANS, int(length_s)))
        edges = np.linspace(first_s, last_s, spans + 1)
        sums = [np.histogram(times, bins=edges, weights=counts)[0] for times, counts in (self._sampled, self._trained)]
        width_s = length_s / spans
        return [
            Rate(
                since_start_s=(index + 0.5) * width_s,
                sampled_per_s=float(sums[0][index]) / width_s,
                trained_per_s=float(sums[1][index]) / width_s,
            )
            for index in range(spans)
        ]
