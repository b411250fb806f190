"""The weighted order in which the rows of several streams are drawn: pure, deterministic, without replacement.

An epoch takes a fixed number of rows from each stream (`plan_mixture`), and `draw` says which row comes next. The
position is a small value (an epoch and a count per stream): a fold keeps it as its state and a draw costs O(streams),
wherever it stands.
This module knows streams by name and rows by index only: no task, no Arena, no message, no clock.

Two orders:

- `smallest_next` emits the stream with the smallest ((emitted + 1) / weight, name). Totals are exact; a prefix may
  deviate from the weights by more than one row (by 1.5 for 5:3:1:1).
- `quota` keeps each prefix within one row of the weights until a stream is exhausted, and again from there on among the
  rest (Tijdeman's rule for the chairman assignment problem, in integers).
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import msgspec
import xxhash

MixtureOrder = Literal["smallest_next", "quota"]

_SHUFFLE_ROUNDS = 8
"""Feistel rounds; four are enough for a pseudo-random permutation, tiny domains want some more."""


class MixtureError(ValueError):
    """The streams and sizes asked for allow no mixture; the text says which value and what is allowed."""


class MixtureStream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream as the mixture sees it."""

    name: str
    num_rows: int
    """Rows the stream can give in one epoch; each is drawn at most once per epoch."""
    sampling_weight: float
    """Finite and > 0; only ratios between streams matter."""


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """A checked plan of one epoch; build it with `plan_mixture`."""

    streams: tuple[MixtureStream, ...]
    counts: tuple[int, ...]
    """Rows of each stream in one epoch, in the order of `streams`."""
    order: MixtureOrder
    seed: int | None
    """Shuffles each stream anew in each epoch; None keeps the source order."""
    integer_weights: tuple[int, ...]
    """The weights, exact as written in decimal, brought to their common denominator."""

    @property
    def epoch_size(self) -> int:
        """Draws in one epoch."""
        return sum(self.counts)


class MixturePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where the next draw stands; (0, zeros) at the start of a run."""

    epoch: int
    emitted: tuple[int, ...]
    """Rows of each stream already drawn in this epoch."""
    settled: tuple[int, ...]
    """What `emitted` was when a stream was last exhausted: `quota` counts from there."""


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn row."""

    stream: str
    row: int
    """Index into the stream's source rows."""
    epoch: int


def plan_mixture(
    streams: Sequence[MixtureStream],
    *,
    epoch_size: int = 0,
    size_multiple: int = 1,
    order: MixtureOrder = "smallest_next",
    seed: int | None = None,
) -> Mixture:
    """Check the streams and fix how many rows of each make an epoch.

    Args:
        streams: Names unique, weights finite and > 0, at least one row each.
        epoch_size: 0 is the union, each row once; otherwise a number of rows, at most the union.
        size_multiple: Groups per step; an epoch_size other than 0 must be divisible by it.
        order: See the module's text.
        seed: Shuffle seed, or None for the source order.

    Raises:
        MixtureError: A value is outside what is allowed; names the stream or the setting.
    """
    masses = _checked_masses(streams)
    _check_sizes(streams, epoch_size=epoch_size, size_multiple=size_multiple)
    union = sum(stream.num_rows for stream in streams)
    counts = [stream.num_rows for stream in streams]
    if epoch_size not in (0, union):
        counts = _allocate(streams, masses, epoch_size)
    exact = [Fraction(repr(float(stream.sampling_weight))) for stream in streams]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return Mixture(
        streams=tuple(streams),
        counts=tuple(counts),
        order=order,
        seed=seed,
        integer_weights=tuple(int(weight * scale) for weight in exact),
    )


def start(mixture: Mixture) -> MixturePosition:
    """The position before the first draw of a run."""
    return _epoch_start(mixture, 0)


def position_at(mixture: Mixture, cursor: int) -> MixturePosition:
    """The position after `cursor` draws of a run; walks through one epoch at the most.

    Raises:
        MixtureError: The cursor is negative.
    """
    if cursor < 0:
        raise MixtureError(f"mixture cursor is {cursor}: expected 0 or more")
    epoch, rest = divmod(cursor, mixture.epoch_size)
    position = _epoch_start(mixture, epoch)
    for _ in range(rest):
        _, position = draw(mixture, position)
    return position


def draw(mixture: Mixture, position: MixturePosition) -> tuple[Draw, MixturePosition]:
    """The next row and the position after it; goes on into the next epoch when one is used up."""
    open_streams = [i for i, count in enumerate(mixture.counts) if position.emitted[i] < count]
    choose = _within_quota if mixture.order == "quota" else _smallest_next
    pick = choose(mixture, position, open_streams)
    stream = mixture.streams[pick]
    index = position.emitted[pick]
    row = index
    if mixture.seed is not None:
        row = shuffled_row(index, num_rows=stream.num_rows, seed=mixture.seed, epoch=position.epoch, name=stream.name)
    drawn = Draw(stream=stream.name, row=row, epoch=position.epoch)
    return drawn, _advance(mixture, position, pick)


def epoch_draws(mixture: Mixture, epoch: int = 0) -> list[Draw]:
    """All draws of one epoch, in order."""
    position = _epoch_start(mixture, epoch)
    draws: list[Draw] = []
    for _ in range(mixture.epoch_size):
        drawn, position = draw(mixture, position)
        draws.append(drawn)
    return draws


def shuffled_row(index: int, *, num_rows: int, seed: int, epoch: int, name: str) -> int:
    """Where a seeded permutation of `num_rows` rows sends `index`, without building it.

    A balanced Feistel network over the smallest even-width power of two, walked until it lands inside; keyed with xxh3,
    whose values never change between versions, so that a replay years later draws the same rows.
    """
    half_bits = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    key = f"{seed}/{epoch}/{name}".encode()
    row = index
    while True:
        left, right = row >> half_bits, row & mask
        for turn in range(_SHUFFLE_ROUNDS):
            salt = right * _SHUFFLE_ROUNDS + turn
            left, right = right, left ^ (xxhash.xxh3_64_intdigest(key, seed=salt) & mask)
        row = left << half_bits | right
        if row < num_rows:
            return row


def _checked_masses(streams: Sequence[MixtureStream]) -> list[float]:
    if not streams:
        raise MixtureError("a mixture needs at least one stream; got none")
    names = [stream.name for stream in streams]
    for name in names:
        if names.count(name) > 1:
            raise MixtureError(f"stream name {name!r} is used {names.count(name)} times: names must be unique")
    for stream in streams:
        if not (math.isfinite(stream.sampling_weight) and stream.sampling_weight > 0):
            raise MixtureError(
                f"stream {stream.name!r} has sampling_weight {stream.sampling_weight!r}: expected finite and > 0"
            )
        if stream.num_rows < 1:
            raise MixtureError(
                f"stream {stream.name!r} has weight {stream.sampling_weight!r} but yields no rows: expected at least 1"
            )
    masses = [stream.num_rows * float(stream.sampling_weight) for stream in streams]
    if not math.isfinite(sum(masses)):
        raise MixtureError(
            f"rows x weight overflows for streams {names}: got {masses}; scale the weights down, only ratios matter"
        )
    return masses


def _check_sizes(streams: Sequence[MixtureStream], *, epoch_size: int, size_multiple: int) -> None:
    union = sum(stream.num_rows for stream in streams)
    if size_multiple < 1:
        raise MixtureError(f"groups per step is {size_multiple}: expected 1 or more")
    if not 0 <= epoch_size <= union:
        raise MixtureError(
            f"epoch_size is {epoch_size}: expected 0 (each row once) to {union} (all rows of all streams)"
        )
    if epoch_size % size_multiple:
        raise MixtureError(f"epoch_size {epoch_size} is not divisible by the {size_multiple} groups per step")


def _allocate(streams: Sequence[MixtureStream], masses: Sequence[float], epoch_size: int) -> list[int]:
    """Share out epoch_size by mass: full streams capped, the rest shared again, then largest remainder."""
    counts = [0] * len(streams)
    left = epoch_size
    active = list(range(len(streams)))
    while active:
        total = sum(masses[i] for i in active)
        shares = {i: left * masses[i] / total for i in active}
        capped = [i for i in active if shares[i] >= streams[i].num_rows]
        if not capped:
            for i in active:
                counts[i] = math.floor(shares[i])
            by_remainder = sorted(active, key=lambda i: (counts[i] - shares[i], streams[i].name))
            for i in by_remainder[: epoch_size - sum(counts)]:
                counts[i] += 1
            break
        for i in capped:
            counts[i] = streams[i].num_rows
            left -= counts[i]
            active.remove(i)
    return counts


def _smallest_next(mixture: Mixture, position: MixturePosition, open_streams: list[int]) -> int:
    streams, emitted = mixture.streams, position.emitted
    return min(open_streams, key=lambda i: ((emitted[i] + 1) / streams[i].sampling_weight, streams[i].name))


def _within_quota(mixture: Mixture, position: MixturePosition, open_streams: list[int]) -> int:
    """Among the streams far enough behind their share, the one whose deadline comes first (Tijdeman 1980)."""
    if len(open_streams) == 1:
        return open_streams[0]
    weights, streams = mixture.integer_weights, mixture.streams
    total = sum(weights[i] for i in open_streams)
    taken = {i: position.emitted[i] - position.settled[i] for i in open_streams}
    turn = sum(taken.values()) + 1
    slack = 2 * len(open_streams) - 2
    behind = [i for i in open_streams if (turn * weights[i] - taken[i] * total) * slack >= total]

    def deadline(i: int) -> int:
        return -((-(taken[i] * slack + slack - 1) * total) // (weights[i] * slack))

    return min(behind, key=lambda i: (deadline(i), streams[i].name))


def _epoch_start(mixture: Mixture, epoch: int) -> MixturePosition:
    zeros = (0,) * len(mixture.streams)
    return MixturePosition(epoch=epoch, emitted=zeros, settled=zeros)


def _advance(mixture: Mixture, position: MixturePosition, pick: int) -> MixturePosition:
    emitted = tuple(count + (i == pick) for i, count in enumerate(position.emitted))
    if emitted == mixture.counts:
        return _epoch_start(mixture, position.epoch + 1)
    exhausted = emitted[pick] == mixture.counts[pick]
    return MixturePosition(epoch=position.epoch, emitted=emitted, settled=emitted if exhausted else position.settled)
