"""Line charts as inline SVG and bars as HTML: pure functions from figures to text. They know nothing of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

import msgspec

WIDTH: Final = 400
HEIGHT: Final = 190
_LEFT: Final = 46
_RIGHT: Final = 10
_TOP: Final = 10
_BOTTOM: Final = 30
_MOST_POINTS: Final = 240
NUM_COLOURS: Final = 8
"""The style sheet has as many: c0 … c7."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), x rising; values that are not finite are left out."""
    dashed: bool = False


def line_chart(series: Sequence[Series], *, x_name: str, y_floor: float | None = None, whole_x: bool = False) -> str:
    """A chart with axes, a grid and a legend.

    Args:
        x_name: what the horizontal axis counts.
        y_floor: the vertical axis begins here at the latest; None: wherever the values do.
        whole_x: x counts whole things.
    """
    shown = [
        (index, one.name, _thinned([point for point in one.points if math.isfinite(point[1])]), one.dashed)
        for index, one in enumerate(series)
    ]
    everything = [point for _, _, points, _ in shown for point in points]
    if not everything:
        return '<p class="none">no figures</p>'
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    y_ticks = ticks(min([*ys, *([] if y_floor is None else [y_floor])]), max(ys))
    x_ticks = ticks(min(xs), max(xs), most=6, whole=whole_x)
    x_low = min(xs)
    x_high = max(xs) if max(xs) > x_low else x_low + 1.0
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        return round(x, 1), round(
            HEIGHT - _BOTTOM - (point[1] - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM), 1
        )

    parts = [_grid(y_ticks, [tick for tick in x_ticks if x_low <= tick <= x_high], place, (x_low, y_low), x_name)]
    for index, name, points, dashed in shown:
        places = [place(point) for point in points]
        style = f"c{index % NUM_COLOURS}{' dashed' if dashed else ''}"
        if len(places) > 1:
            path = " ".join(f"{x:g},{y:g}" for x, y in places)
            parts.append(f'<polyline class="line {style}" points="{path}"/>')
        if len(places) <= 40 and not dashed:
            parts += [
                f'<circle class="dot {style}" cx="{x:g}" cy="{y:g}" r="2.2"><title>{escape(name)} '
                f"{escape(x_name)} {short(point[0])}: {short(point[1])}</title></circle>"
                for (x, y), point in zip(places, points, strict=True)
            ]
    legend = "".join(
        f'<span class="key"><i class="c{index % NUM_COLOURS}"></i>{escape(name)}</span>' for index, name, _, _ in shown
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
    return (f'<div class="legend">{legend}</div>' if len(shown) > 1 else "") + svg


def _grid(
    y_ticks: Sequence[float],
    x_ticks: Sequence[float],
    place: Callable[[tuple[float, float]], tuple[float, float]],
    low: tuple[float, float],
    x_name: str,
) -> str:
    parts: list[str] = []
    for tick in y_ticks:
        _, y = place((low[0], tick))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{short(tick)}</text>')
    for tick in x_ticks:
        x, _ = place((tick, low[1]))
        parts.append(f'<text x="{x:g}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - _RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_name)}</text>')
    return "".join(parts)


def ticks(low: float, high: float, *, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, `most` steps at the most."""
    if high - low < 1e-12 * max(1.0, abs(low), abs(high)):
        margin = max(abs(low) * 0.1, 1e-9)
        low, high = (low - margin, high + margin) if low else (0.0, 1.0)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 240 points: means over neighbours."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return list(points)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def short(value: float) -> str:
    """A number in few characters."""
    if value == 0:
        return "0"
    size = abs(value)
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= factor * (10 if unit == "k" else 1):
            return f"{value / factor:.3g}{unit}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 or value == int(value) else f"{value:.3g}"


def bars(counts: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars of (name, length, text beside it)."""
    longest = max((value for _, value, _ in counts), default=0.0) or 1.0
    return "".join(
        f'<div class="bar"><span class="name">{escape(name)}</span>'
        f'<span class="track"><i style="width:{_share(value, longest):.1f}%"></i></span>'
        f'<span class="value">{escape(text)}</span></div>'
        for name, value, text in counts
    )


def _share(value: float, longest: float) -> float:
    """In percent; what is there is seen."""
    return max(0.5, 100 * value / longest) if value else 0.0
