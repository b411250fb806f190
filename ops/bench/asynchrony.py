"""Asynchronous training beside synchronous training (`max_staleness = 0`), over a long-tailed generator in simulated time.

The folds are the real ones (`ops.bench.pacing`); rollouts, training and broadcast only take time. The tail is that of
published agentic runs, and training takes what rollouts leave of a synchronous step there. A milder tail stands beside it.
"""

from __future__ import annotations

import math
from typing import Final

from ops.bench.pacing import Course, Pace, simulate
from ops.bench.result import BenchResult, machine

STALENESS: Final = (0, 1, 2, 4, 8)
SOURCES: Final = (
    "p99 of a rollout's length about ten times the median: Laminar, arXiv 2510.12633; longest more than twenty times the "
    "median, rollouts over 70 % of a synchronous step, 2.72 times faster on agentic tasks when asynchronous: ROLL Flash, "
    "arXiv 2510.11345"
)
PUBLISHED_SPEEDUP: Final = 2.72
_P99: Final = 2.326
"""Of the standard normal distribution."""
TAILS: Final = {"p99_10x": math.log(10) / _P99, "p99_3x": math.log(3) / _P99}


def pace(sigma: float, max_staleness: int) -> Pace:
    """128 rollouts a step on an engine that runs 64 at once."""
    return Pace(max_staleness=max_staleness, sigma=sigma, engine_slots=64, train_s=5.5, broadcast_s=0.5, steps=100)


def run() -> BenchResult:
    """Speed of each bound, in trained steps per simulated second over those of bound 0."""
    metrics: dict[str, float | str] = {}
    reference: dict[str, float | str] = {"source": SOURCES, "published_agentic_speedup": PUBLISHED_SPEEDUP}
    ratio: dict[str, float] = {}
    for tail, sigma in TAILS.items():
        synchronous: Course | None = None
        for bound in STALENESS:
            settings = pace(sigma, bound)
            course = simulate(settings)
            synchronous = synchronous or course
            key = f"{tail}_staleness_{bound}"
            metrics[f"{key}_step_s"] = round(course.seconds / settings.steps, 3)
            metrics[f"{key}_engine_places_idle"] = round(course.idle_share, 3)
            metrics[f"{key}_engine_without_requests"] = round(course.no_request_s / course.seconds, 3)
            metrics[f"{key}_rollouts_dropped_as_stale"] = round(_dropped(course), 3)
            metrics[f"{key}_worst_staleness"] = _worst(course)
            ratio[f"{key}_over_synchronous"] = round(synchronous.seconds / course.seconds, 3)
            if bound == 0:
                rollouts_s = course.seconds / settings.steps - settings.train_s - settings.broadcast_s
                reference[f"{tail}_rollout_share_of_synchronous_step"] = round(
                    rollouts_s * settings.steps / course.seconds, 3
                )
    return BenchResult(name="async", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


def _dropped(course: Course) -> float:
    """Share of the finished rollouts that were in no step and will be in none."""
    slots = sum(course.dropped_groups.values()) * 8 + course.stale_slots
    return slots / course.finished_rollouts


def _worst(course: Course) -> int:
    return max(manifest.step - 1 - int(manifest.min_version.as_numpy().min()) for manifest in course.manifests())
