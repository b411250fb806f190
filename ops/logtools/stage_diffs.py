"""`headrace replay FILE --stage S --diff`: today's code of one stage on the recorded input, held against the recorded output.

No broker, no engine, no Arena is started.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
import msgspec

from broker.errors import BrokerError
from broker.recording import Recording
from ops.config import RunConfig, assembly_settings, run_streams
from ops.logtools.differences import (
    Compared,
    Difference,
    DifferenceKind,
    DiffReport,
    FieldDifference,
    field_differences,
)
from ops.logtools.recorded import RecordedGroups, RecordedPayloads, RecordedSessions, recorded_config
from ops.logtools.soundness import soundness
from ops.logtools.sources import retried, tell
from ops.policy_folder import prepare_policy, weights_digest
from ops.run_folder import RunFolder
from ops.workers.trainer import open_backend
from pipeline.errors import ContractError, DeadlineError, PipelineError
from pipeline.fold import Output
from pipeline.generations import Generations
from pipeline.retries import retries_of
from pipeline.runner import describe
from schemas.errors import ConfigError, DecodeError, SchemaError
from schemas.messages.rollout import EpisodeEnded, Trajectory
from schemas.messages.sampling import RunStarted
from schemas.messages.training import Manifest, StepAssembled, StepTrained
from schemas.payload import PayloadRef
from schemas.subjects import Topic
from schemas.topics import EPISODE_ENDED, GROUP_CLOSED, RUN_STARTED, STEP_ASSEMBLED, STEP_TRAINED, TRAJECTORY_READY
from stages.assembly.fold import AssemblyFold
from stages.rewards.map_rewards import RewardSettings, gave_up, map_rewards
from stages.rewards.transforms import load_rewards
from stages.training.loop import row_arrays

_SPEEDS: Final = "perf/"

StageCheck = Callable[[Recording, RunConfig, list[str]], AsyncIterator[Compared]]
"""Recording, config, list that takes what is unfinished → each output that was compared."""


async def diff_stage(recording: Recording, stage: str, overrides: Sequence[str] = ()) -> DiffReport:
    """Run today's code of a stage on a recording.

    Args:
        overrides: `a.b=c` on top of the recorded config.

    Raises:
        ConfigError: no such stage, or a config that can't be used.
    """
    check = STAGES.get(stage)
    if check is None:
        raise ConfigError(f"--stage {stage}: expected one of {', '.join(STAGES)}")
    config = recorded_config(recording, overrides)
    compared = 0
    found: list[Difference] = []
    unfinished: list[str] = []
    async for one in check(recording, config, unfinished):
        compared += 1
        if one.difference is not None:
            found.append(one.difference)
    sound = soundness(recording)
    return DiffReport(
        nothing="" if compared else _nothing(recording, stage),
        damages=sound.damages,
        gaps=sound.gaps,
        stage=stage,
        recording=str(recording.path),
        run=recording.run,
        compared=compared,
        differences=len(found),
        changed=found,
        unfinished=unfinished,
        overrides=list(overrides),
    )


def _nothing(recording: Recording, stage: str) -> str:
    """Why nothing was compared: what the stage reads and makes, and how much of it the recording holds."""
    topics = recording.topics()

    def counted(wanted: Sequence[Topic[Any]]) -> str:
        return " and ".join(f"{topics[t.name].messages if t.name in topics else 0} {t.name}" for t in wanted)

    read, made = _READS_AND_MAKES[stage]
    return (
        f"up to sequence {recording.last_sequence} the recording holds {counted(read)} for the stage to read, and "
        f"{counted(made)} to hold against what it makes"
    )


_READS_AND_MAKES: Final[Mapping[str, tuple[Sequence[Topic[Any]], Sequence[Topic[Any]]]]] = {
    "reward": ([EPISODE_ENDED], [TRAJECTORY_READY]),
    "assembly": ([TRAJECTORY_READY], [GROUP_CLOSED, STEP_ASSEMBLED]),
    "training": ([STEP_ASSEMBLED], [STEP_TRAINED]),
}


async def diff_reward(recording: Recording, config: RunConfig, unfinished: list[str]) -> AsyncIterator[Compared]:
    """Reward mapping: each episode's end again, against its trajectory."""
    groups = RecordedGroups(recording)
    sessions, payloads = RecordedSessions(groups), RecordedPayloads(recording)
    settings = reward_settings(config)
    filters = [EPISODE_ENDED.filter(recording.run), retries_of(recording.run, "map_rewards")]
    for record in recording.records(filters):
        ended = retried(record).message
        if not isinstance(ended, EpisodeEnded) or not ended.final:
            continue
        key = f"{ended.group}.{ended.slot}"
        standing = groups.group(ended.group).ready.get(ended.slot)
        failed = ""
        try:
            made = [*await map_rewards(ended, sessions=sessions, payloads=payloads, settings=settings)]
        except (DeadlineError, BrokerError) as error:
            made, failed = [], str(error)
        except (PipelineError, SchemaError, ExceptionGroup) as error:
            made = [message for message in gave_up(ended, describe(error)) if isinstance(message, Trajectory)]
        if standing is None:
            unfinished.append(f"episode {ended.group}/{ended.slot}/{ended.attempt}: no trajectory was recorded")
            continue
        yield _compare(TRAJECTORY_READY, key, standing.message, made[0] if made else None, failed)


def reward_settings(config: RunConfig) -> RewardSettings:
    """What reward mapping depends on."""
    streams = run_streams(config)
    return RewardSettings(
        export="individual" if config.reward.export == "individual" else "concat",
        turn_discount=config.reward.turn_discount,
        shared_tokens="all" if config.reward.shared_tokens == "all" else "first",
        rewards=load_rewards(streams),
        expected_rewards={
            name: f"{stream.expected_reward_ref.key}@{stream.expected_reward_ref.version}"
            for name, stream in streams.items()
            if stream.expected_reward_ref is not None
        },
    )


async def diff_assembly(recording: Recording, config: RunConfig, unfinished: list[str]) -> AsyncIterator[Compared]:
    """Assembly: the fold over the recorded log again, against its closes, steps and manifests."""
    fold = AssemblyFold(assembly_settings(config))
    topics: dict[type[msgspec.Struct], Topic[Any]] = {topic.message: topic for topic in fold.produces}
    by_subject: dict[str, bytes] = {}
    last_output = 0
    for record in recording.records([topic.filter(recording.run) for topic in fold.produces]):
        by_subject.setdefault(record.subject, record.data)
        last_output = record.sequence
    state = fold.initial()
    filters = [*(topic.filter(recording.run) for topic in fold.consumes), retries_of(recording.run, fold.name)]
    for record in recording.records(filters):
        message = retried(record).message
        if message is None:
            continue
        try:
            outputs = fold.step(state, message)
        except ContractError as error:
            key = ".".join(record.subject.split(".")[2:])
            yield _failed("assembly", key, f"the fold stops at sequence {record.sequence}: {error}")
            break
        for output in outputs:
            topic = topics[type(output.message)]
            standing = by_subject.pop(topic.subject(recording.run, output.message), None)
            if standing is None and record.sequence > last_output:
                unfinished.append(f"{topic.name} {topic.key(output.message)}: its input is the last of the recording")
            else:
                yield _compare_output(recording, topic, standing, output)
    for subject in by_subject:
        name = ".".join(subject.split(".")[2:4])
        yield _difference(
            name, subject.split(".", 4)[4], DifferenceKind.MISSING, reason="today's code does not make it"
        )
    for group in state.open.values():
        missing = sorted(set(range(group.num_slots)) - set(group.members))
        names = ", ".join(str(slot) for slot in missing)
        unfinished.append(
            f"group {group.group}: the recording ends without its slots {names}; nothing of it is trained"
        )


def _compare_output(recording: Recording, topic: Topic[Any], standing: bytes | None, output: Output) -> Compared:
    key = topic.key(output.message)
    if standing is None:
        return _difference(topic.name, key, DifferenceKind.EXTRA, reason="not in the recording")
    if topic.encode(output.message) == standing:
        return Compared(topic=topic.name, key=key)
    try:
        recorded: msgspec.Struct = topic.decode(standing)
    except DecodeError as error:
        return _failed(topic.name, key, f"the recorded output can't be read: {error}")
    fields = field_differences(recorded, output.message)
    if isinstance(recorded, StepAssembled) and output.payloads:
        fields = [field for field in fields if field.path != "manifest"]
        try:
            former = msgspec.msgpack.decode(recording.payload(recorded.manifest), type=Manifest)
        except (BrokerError, SchemaError, msgspec.MsgspecError) as error:
            return _failed(topic.name, key, f"the recorded manifest can't be read: {error}")
        fields += _under(
            field_differences(former, msgspec.msgpack.decode(output.payloads[0], type=Manifest)), "manifest"
        )
    if not fields:
        return Compared(topic=topic.name, key=key)
    return Compared(
        topic=topic.name,
        key=key,
        difference=Difference(topic=topic.name, key=key, kind=DifferenceKind.CHANGED, fields=fields),
    )


def _under(fields: list[FieldDifference], path: str) -> list[FieldDifference]:
    return [msgspec.structs.replace(field, path=f"{path}.{field.path}") for field in fields]


async def diff_training(recording: Recording, config: RunConfig, unfinished: list[str]) -> AsyncIterator[Compared]:
    """Training: the recorded manifests and rows again, from version 0, against the digests of the weights."""
    trained: dict[int, StepTrained] = {}
    generations = Generations()
    for record in recording.records([STEP_TRAINED.filter(recording.run)]):
        message = tell(record).message
        if isinstance(message, StepTrained) and generations.admits(message.generation):
            trained.setdefault(message.step, message)
    with tempfile.TemporaryDirectory(prefix="headrace-replay-") as name:
        folder = RunFolder(Path(name))
        folder.create()
        if config.training.backend != "standin":
            made = await anyio.to_thread.run_sync(prepare_policy, config, folder)
            if (other := _other_start(recording, weights_digest(made))) is not None:
                yield other
                return
        with open_backend(config, folder) as backend:
            backend.resume()
            done = 0
            for record in recording.records([STEP_ASSEMBLED.filter(recording.run)]):
                step = tell(record).message
                if not isinstance(step, StepAssembled) or step.step <= done:
                    continue
                if step.step != done + 1:
                    reason = f"its recording begins at step {step.step}; training is replayed from step 1 on"
                    yield _failed(STEP_TRAINED.name, str(step.step), reason)
                    return
                standing = trained.get(step.step)
                if standing is None:
                    unfinished.append(f"step {step.step}: assembled, and not trained before the recording ends")
                    return
                try:
                    manifest = msgspec.msgpack.decode(recording.payload(step.manifest), type=Manifest)
                    sizes: list[int] = manifest.payload_sizes.as_numpy().tolist()
                    refs = [
                        PayloadRef(store=manifest.payload_store, id=payload_id, size_bytes=size)
                        for payload_id, size in zip(manifest.payload_ids, sizes, strict=True)
                    ]
                    rows = {
                        index: row_arrays(recording.payload(refs[index])) for index in backend.rows_needed(manifest)
                    }
                except (BrokerError, SchemaError, ContractError, msgspec.MsgspecError) as error:
                    yield _failed(STEP_TRAINED.name, str(step.step), str(error))
                    return
                result = await anyio.to_thread.run_sync(backend.train, manifest, rows)
                done = step.step
                now = msgspec.structs.replace(
                    standing,
                    digest=result.digest,
                    skipped=result.skipped,
                    stats={**dict(result.stats), **_measured(standing)},
                )
                yield _compare(STEP_TRAINED, f"{step.step}.{standing.generation}", standing, now, "")


def _other_start(recording: Recording, digest: str) -> Compared | None:
    """What to say where version 0 is not what the run began with: every step would differ for that reason alone."""
    first = next(iter(recording.records([RUN_STARTED.filter(recording.run)])), None)
    started = None if first is None else tell(first).message
    if not isinstance(started, RunStarted) or started.policy_digest in ("", digest):
        return None
    reason = (
        f"version 0 has the weights {digest}, the run began with {started.policy_digest}: the code that makes the policy, or "
        "the folder, has changed since. Name the folder that the run used: --set policy.folder=…"
    )
    return _failed(RUN_STARTED.name, str(started.ordinal), reason)


def _measured(trained: StepTrained) -> dict[str, float]:
    """What depends on the machine and not on the code: speeds."""
    return {name: value for name, value in trained.stats.items() if name.startswith(_SPEEDS)}


def _compare(
    topic: Topic[Any], key: str, standing: msgspec.Struct, now: msgspec.Struct | None, failed: str
) -> Compared:
    if now is None:
        if failed:
            return _failed(topic.name, key, failed)
        return _difference(topic.name, key, DifferenceKind.MISSING, reason="today's code does not make it")
    fields = field_differences(standing, now)
    difference = Difference(topic=topic.name, key=key, kind=DifferenceKind.CHANGED, fields=fields) if fields else None
    return Compared(topic=topic.name, key=key, difference=difference)


def _difference(topic: str, key: str, kind: DifferenceKind, *, reason: str) -> Compared:
    return Compared(topic=topic, key=key, difference=Difference(topic=topic, key=key, kind=kind, reason=reason))


def _failed(topic: str, key: str, reason: str) -> Compared:
    return _difference(topic, key, DifferenceKind.FAILED, reason=reason)


STAGES: Final[Mapping[str, StageCheck]] = {
    "reward": diff_reward,
    "assembly": diff_assembly,
    "training": diff_training,
}
