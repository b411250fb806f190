"""Reads a log once, from its start to its present end, into a report's figures. Writes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from broker.errors import BrokerError
from ops.accounts import Account, KeptAccount, read_ledger
from ops.config import RunConfig, assembly_settings, staleness_bound
from ops.logtools.plain import moment
from ops.logtools.sources import LiveSource, LogSource, tell
from ops.report.figures import Fault, Rate, ReportFigures, StepFigures
from ops.report.hops import HopTimes, Throughput
from pipeline.generations import Generations
from schemas.errors import ConfigError, SchemaError
from schemas.messages.rollout import Trajectory
from schemas.messages.sampling import Control, DeadLetter, GroupClosed, RunStarted, StreamListed
from schemas.messages.training import FoldCheckpoint, Manifest, StepAssembled, StepTrained
from schemas.payload import PayloadRef
from schemas.subjects import PREFIX

_TOPICS: Final = (
    "run.started", "run.control", "stream.listed", "group.issued", "group.closed", "episode.requested",
    "episode.launched", "episode.accepted", "episode.ended", "trajectory.ready", "step.assembled", "step.trained",
    "dead.letter",
)  # fmt: skip
_REASON_CHARS: Final = 80
_NEVER_PURGED: Final = (RunStarted, StreamListed, Control, DeadLetter)
_TRIES: Final = 3
"""To read a log that is purged meanwhile."""


async def gather(source: LogSource) -> ReportFigures:
    """A report's figures.

    Raises:
        BrokerError: the log can't be read.
    """
    for _ in range(_TRIES):
        kept = await _kept(source)
        reading = await _read(source, kept)
        if (await _kept(source)).sequence == kept.sequence:
            break
    else:
        raise BrokerError(f"the log of run {source.run} was purged {_TRIES} times while it was read: try again")
    await _open_manifests(source, reading)
    return reading.result(source.place, await _folded_up_to(source, reading))


async def _kept(source: LogSource) -> KeptAccount:
    """The account of what was purged; a recording has what was purged later."""
    return await read_ledger(source.broker) if isinstance(source, LiveSource) else KeptAccount()


async def _read(source: LogSource, kept: KeptAccount) -> _Reading:
    reading = _Reading(source.run, kept)
    async for record in source.read([f"{PREFIX}.{source.run}.{topic}.>" for topic in _TOPICS]):
        told = tell(record)
        reading.take(told.message, record.sequence, record.unix_time_s)
    return reading


async def _open_manifests(source: LogSource, reading: _Reading) -> None:
    """Figures by stream stand in the steps' manifests; retention may have removed old ones."""
    for step, ref in reading.manifests.items():
        try:
            manifest = msgspec.msgpack.decode(await source.payload(ref), type=Manifest)
        except (BrokerError, SchemaError, msgspec.MsgspecError):
            reading.num_manifests_missing += 1
            continue
        figures = reading.steps[step]
        figures.staleness_mean = manifest.stats.get("staleness_mean")
        figures.reward_by_stream = {
            stream: stats["reward_mean"] for stream, stats in manifest.stream_stats.items() if "reward_mean" in stats
        }


async def _folded_up_to(source: LogSource, reading: _Reading) -> int:
    """Up to where assembly has read: from its checkpoint, or, in a recording, from what it last closed."""
    if isinstance(source, LiveSource):
        found = await source.broker.load_state("fold.assembly")
        if found is not None:
            checkpoint = msgspec.msgpack.decode(found[0], type=FoldCheckpoint)
            return max(checkpoint.sequence, reading.folded_at_least)
    return reading.folded_at_least


class _Reading:
    """Collects messages in the order of the log."""

    def __init__(self, run: str, kept: KeptAccount) -> None:
        """Args:
        run: its id.
        kept: what the run's account had counted before it was purged.
        """
        self.run: Final = run
        self._kept: Final = kept
        self.steps: Final[dict[int, StepFigures]] = {}
        self.manifests: Final[dict[int, PayloadRef]] = {}
        self.num_manifests_missing = 0
        self.folded_at_least = 0
        self._account: Final = Account(run, staleness_bound=None, state=kept.state)
        self._hops: Final = HopTimes()
        self._throughput: Final = Throughput()
        self._started: RunStarted | None = None
        self._num_starts = 0
        self._streams: Final[list[str]] = []
        self._letters: Final[dict[tuple[str, str], tuple[int, DeadLetter]]] = {}
        self._rejected: Final[Counter[str]] = Counter()
        self._controls: Final[list[str]] = []
        self._latest: Final[dict[str, int]] = {}
        """Of each open group: where its latest trajectory stands."""
        self._first_s = self._last_s = 0.0
        self._whole_from_s = 0.0
        """From when on nothing was purged."""
        self._num_messages = self._num_unreadable = 0
        self._generations: Final = Generations()

    def take(self, message: msgspec.Struct | None, sequence: int, time_s: float) -> None:
        """One message, with its place and time."""
        self._first_s = self._first_s or time_s
        self._last_s = max(self._last_s, time_s)
        self._num_messages += 1
        if message is None:
            self._num_unreadable += 1
            return
        self._count(message, sequence, time_s)
        self._hops.take(message, time_s)
        match message:
            case RunStarted():
                self._started = self._started or message
                self._num_starts += 1
            case StreamListed(stream=stream):
                self._streams.append(stream)
            case Control():
                why = f": {message.reason}" if message.reason else ""
                self._controls.append(f"{moment(time_s)} {message.action.value}{why}")
            case Trajectory():
                self._latest[message.group] = sequence
                self._throughput.sampled(time_s, message.num_completion_tokens)
                if message.rejected:
                    self._rejected[_shortened(message.reason) or message.outcome.value] += 1
            case GroupClosed():
                latest = self._latest.pop(message.group, 0)
                if not message.num_missing:
                    # It was closed on reading its last trajectory, so everything before that has been read.
                    self.folded_at_least = max(self.folded_at_least, latest)
            case StepAssembled():
                self._assembled(message, time_s)
            case StepTrained() if self._generations.admits(message.generation):
                self._trained(message, time_s)
            case DeadLetter():
                count, _ = self._letters.get((message.stage, message.reason), (0, message))
                self._letters[message.stage, message.reason] = (count + 1, message)
            case _:
                pass

    def _count(self, message: msgspec.Struct, sequence: int, time_s: float) -> None:
        if sequence > self._kept.sequence:
            self._account.take(message, sequence)
        if not isinstance(message, _NEVER_PURGED):
            self._whole_from_s = self._whole_from_s or time_s

    def _assembled(self, message: StepAssembled, time_s: float) -> None:
        if message.step in self.steps:
            return
        self.steps[message.step] = StepFigures(
            step=message.step,
            assembled_unix_s=time_s,
            reward=message.mean_reward,
            staleness_max=message.step - 1 - message.min_version,
            num_rows=message.num_rows,
            num_tokens=message.num_tokens,
        )
        self.manifests[message.step] = message.manifest

    def _trained(self, message: StepTrained, time_s: float) -> None:
        figures = self.steps.get(message.step)
        if figures is None or figures.is_trained:
            return
        figures.trained_unix_s = time_s
        figures.seconds = message.seconds
        figures.stats = message.stats
        figures.skipped = message.skipped
        self._throughput.trained(time_s, message.num_tokens or figures.num_tokens)

    def result(self, place: str, folded_up_to: int) -> ReportFigures:
        """Everything on the page."""
        bound, estimator = _settings(self._started)
        counted = self._account.result(folded_up_to=folded_up_to, seconds=self._last_s - self._first_s)
        staleness = msgspec.structs.replace(counted.staleness, bound=bound)
        return ReportFigures(
            run=self.run,
            place=place,
            headrace_version=self._started.headrace_version if self._started else "",
            estimator=estimator,
            streams=self._streams or list(counted.groups_by_stream),
            first_unix_s=self._first_s,
            last_unix_s=self._last_s,
            num_messages=self._num_messages,
            num_unreadable=self._num_unreadable,
            num_starts=self._num_starts,
            account=msgspec.structs.replace(counted, staleness=staleness),
            steps=[self.steps[step] for step in sorted(self.steps)],
            num_manifests_missing=self.num_manifests_missing,
            hops=self._hops.result(),
            rates=self._rates(),
            purged_up_to=self._kept.sequence,
            faults=[
                Fault(
                    stage=stage,
                    reason=reason,
                    count=count,
                    example=letter.error,
                    letter=f"{stage}:{letter.sequence}",
                )
                for (stage, reason), (count, letter) in sorted(self._letters.items())
            ],
            rejected_slots=dict(self._rejected.most_common(12)),
            controls=self._controls,
        )

    def _rates(self) -> list[Rate]:
        """Tokens by time, from when on all are known."""
        if not self._kept.sequence:
            return self._throughput.result(self._first_s, self._last_s)
        later_s = self._whole_from_s - self._first_s
        return [
            msgspec.structs.replace(rate, since_start_s=rate.since_start_s + later_s)
            for rate in self._throughput.result(self._whole_from_s, self._last_s)
        ]


def _settings(started: RunStarted | None) -> tuple[int | None, str]:
    """The run's staleness bound and estimator, as far as this version understands its config."""
    if started is None:
        return None, ""
    try:
        config = msgspec.json.decode(started.config_json, type=RunConfig)
        return staleness_bound(config), assembly_settings(config).estimator.name
    except (msgspec.MsgspecError, ConfigError):
        return None, ""


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARS else f"{reason[:_REASON_CHARS]}…"
