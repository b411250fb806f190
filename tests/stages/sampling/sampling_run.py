"""The rest of the loop, as a sampling fold sees it."""

from __future__ import annotations

import msgspec

from schemas.messages.sampling import GroupClosed, GroupIssued, RunFinished, RunStarted, StreamListed, StreamRow
from schemas.messages.training import DroppedGroup, StepAssembled, StepTrained
from schemas.payload import run_ref
from stages.sampling.fold import SamplingFold
from stages.sampling.settings import SamplingSettings
from stages.sampling.state import SamplingState


class Run:
    """Plays the rest of the loop for a sampling fold."""

    def __init__(
        self,
        *,
        prompts: dict[str, int],
        evaluated: dict[str, int] | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        **changes,
    ) -> None:
        settings = SamplingSettings(
            streams=tuple(prompts), groups_per_step=2, slots_per_group=4, max_staleness=1, max_concurrent_groups=100
        )
        self.settings = msgspec.structs.replace(settings, **changes)
        self.fold = SamplingFold(self.settings)
        self.state = self.fold.initial()
        self.issued: list[GroupIssued] = []
        self.finished: list[RunFinished] = []
        self.waiting: list[str] = []
        self.step = 0
        self.starts = 0
        self.prompts = {**(evaluated or {}), **prompts}
        self.begin(steps=steps, epochs=epochs)
        for name, count in self.prompts.items():
            data = msgspec.msgpack.encode([StreamRow(data_id=f"{name}{i}") for i in range(count)])
            listed = StreamListed(stream=name, rows=run_ref(data), num_rows=count, weight=1.0)
            if (ref := self.fold.wants(listed)) is not None:
                self.fold.load(ref, memoryview(data))
            self.say(listed)

    def begin(self, *, steps: int | None = None, epochs: int | None = None) -> None:
        self.say(
            RunStarted(
                ordinal=self.starts,
                config_json=b"",
                config_digest="",
                headrace_version="0",
                steps=steps,
                epochs=epochs,
            )
        )
        self.starts += 1

    def say(self, message: msgspec.Struct) -> list[GroupIssued]:
        outputs = [output.message for output in self.fold.step(self.state, message)]
        new = [one for one in outputs if isinstance(one, GroupIssued)]
        self.finished += [one for one in outputs if isinstance(one, RunFinished)]
        self.issued += new
        return new

    def close(self, group: str, *, usable: bool = True) -> list[GroupIssued]:
        if usable:
            self.waiting.append(group)
        return self.say(GroupClosed(group=group, stream="a", usable=usable, reason="" if usable else "zero_spread"))

    def train(self, *, dropped: tuple[str, ...] = ()) -> list[GroupIssued]:
        """Assemble and train a step of the groups that wait longest."""
        size = self.settings.groups_per_step
        self.step += 1
        groups, self.waiting = self.waiting[:size], self.waiting[size:]
        self.waiting = [group for group in self.waiting if group not in dropped]
        new = self.say(
            StepAssembled(
                step=self.step,
                manifest=run_ref(b""),
                groups=groups,
                dropped=[DroppedGroup(group=group, stream="a", reason="stale") for group in dropped],
                num_rows=8,
                num_tokens=8,
                num_mini_batches=1,
                min_version=0,
                mean_reward=0.5,
            )
        )
        return new + self.say(StepTrained(step=self.step, generation=1, digest="", manifest_id=""))

    def restore(self) -> None:
        """As after a crash: only the checkpoint's bytes are left."""
        data = msgspec.msgpack.encode(self.state)
        self.fold = SamplingFold(self.settings)
        self.state = msgspec.msgpack.decode(data, type=SamplingState)
        for ref in self.fold.wanted_by(self.state):
            name = next(name for name, listed in self.state.listed.items() if listed.rows.id == ref.id)
            rows = [StreamRow(data_id=f"{name}{i}") for i in range(self.prompts[name])]
            self.fold.load(ref, memoryview(msgspec.msgpack.encode(rows)))
