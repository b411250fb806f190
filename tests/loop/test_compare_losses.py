"""A second run that trains from the trajectories of a first one: the same rollouts, other numbers, the first untouched."""

import sys
from pathlib import Path

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

sys.path.insert(0, str(Path(__file__).parent))

from compare_runs import GROUPS_PER_STEP, FirstRun, config_of, manifests_of, until_trained

from broker.memory import MemoryBroker, MemoryServer
from ops.config import assembly_settings
from ops.run_folder import Endpoints, RunFolderError
from ops.running.bridge import Bridge
from ops.running.progress import Progress
from ops.running.run import run
from ops.running.source import SourceRunError, find_source, open_source, read_end
from pipeline.fold import replay
from schemas.errors import ConfigError
from stages.assembly.fold import AssemblyFold

STEPS = 5
OTHER = {"estimator": {"name": "rloo"}, "aggregation": "seq_mean"}


@pytest.fixture
async def finished(tmp_path):
    first = FirstRun(tmp_path / "first")
    await first.begin(steps=STEPS)
    await first.sample(range(STEPS * GROUPS_PER_STEP))
    await first.train(STEPS)
    yield first
    await first.server.stop()


def second(tmp_path, name="second", *, steps=STEPS, **sections):
    return config_of(name, tmp_path / name, run={"from_run": str(tmp_path / "first"), "steps": steps}, **sections)


async def log_of(first):
    async with first.open() as broker:
        status = await broker.log_status()
        async with broker.read(["hr.first.>"], follow=False) as records:
            return status.last_sequence, status.payload_bytes, [(r.sequence, r.subject, r.data) async for r in records]


async def test_two_losses_train_the_same_groups_and_the_first_run_stays_as_it_was(finished, tmp_path):
    before = await log_of(finished)
    grpo = await run(second(tmp_path, "grpo"))
    rloo = await run(second(tmp_path, "rloo", assembly=OTHER))
    assert await log_of(finished) == before
    for outcome in (grpo, rloo):
        counted = outcome.account
        assert (counted.steps, counted.groups.trained, counted.unexplained) == (STEPS, STEPS * GROUPS_PER_STEP, 0)
        assert counted.staleness.bound is None
    await finished.server.stop()
    ours, theirs = await manifests_of(tmp_path / "grpo", "grpo"), await manifests_of(tmp_path / "rloo", "rloo")
    assert [m.groups for m in ours] == [m.groups for m in theirs]
    assert [m.payload_ids for m in ours] == [m.payload_ids for m in theirs]
    assert [(m.algorithm, m.aggregation) for m in (ours[0], theirs[0])] == [
        ("grpo", "token_mean"),
        ("rloo", "seq_mean"),
    ]
    assert msgspec.msgpack.encode(ours[0].advantage) != msgspec.msgpack.encode(theirs[0].advantage)


async def test_a_run_that_is_over_is_served_in_parts_and_its_end_ends_the_second(finished, tmp_path):
    _, _, records = await log_of(finished)
    await finished.server.stop()
    config = second(tmp_path, steps=2)
    with capture_logs() as told:
        async with open_source(find_source(config)) as (_, is_over):
            assert is_over
    assert [line for line in told if line["log_level"] in ("warning", "error")] == []
    first_part = await run(config)
    assert first_part.account.steps == 2
    outcome = await run(second(tmp_path, steps=None))
    assert (outcome.account.steps, outcome.interrupted) == (STEPS, False)
    # Folding the first run's log by hand gives the very same manifests, in one go.
    fold = AssemblyFold(assembly_settings(config))
    messages = [topic.decode(data) for _, subject, data in records for topic in fold.consumes if topic.name in subject]
    once = [output.payloads[0] for output in replay(fold, messages) if output.payloads]
    assert [msgspec.msgpack.encode(manifest) for manifest in await manifests_of(tmp_path / "second", "second")] == once
    await finished.server.start()  # its store is free again


async def test_a_first_run_that_goes_on_is_followed_and_its_end_is_survived(tmp_path):
    first = FirstRun(tmp_path / "first")
    await first.begin(steps=100)
    await first.sample(range(2))
    outcomes = []

    async def train() -> None:
        outcomes.append(await run(second(tmp_path, steps=4)))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await first.sample(range(2, 4))
            await until_trained(tmp_path / "second", 2)
            await first.sample(range(4, 8))
            await first.server.stop()  # the bridge serves the rest of its log itself
    assert outcomes[0].account.steps == 4


async def test_a_run_on_a_shared_broker_is_found_by_its_id(finished, tmp_path):
    broker = {"url": finished.server.url, "token_file": str(finished.server.token_file)}
    config = config_of("second", tmp_path / "second", run={"from_run": "first"}, broker=broker)
    source = find_source(config)
    assert (source.run, source.folder) == ("first", "")
    async with open_source(source) as (first, is_over):
        assert (first.run, is_over, (await read_end(first)).reached) == ("first", False, True)
    with pytest.raises(RunFolderError, match="expected the folder of a run"):
        find_source(config_of("second", tmp_path / "second", run={"from_run": "first"}))


async def test_what_sampling_fixed_must_be_the_same(finished, tmp_path):
    with pytest.raises(ConfigError, match=r"sampling\.slots_per_group: expected 4"):
        await run(second(tmp_path, sampling={"slots_per_group": 8}))
    with pytest.raises(ConfigError, match=r"rollout\.temperature: expected 1\.0"):
        await run(second(tmp_path, rollout={"temperature": 0.7}))
    assert not (tmp_path / "second" / "nats").exists()


async def test_a_folder_goes_on_with_the_first_run_that_it_was_begun_from(finished, tmp_path):
    server = MemoryServer()
    broker = MemoryBroker(server, "second")
    config = second(tmp_path)
    other = find_source(config)
    bridge = Bridge(msgspec.structs.replace(other, run="another"), broker, Progress(config))
    await bridge._save()
    again = Bridge(other, broker, Progress(config))
    await again.run()
    assert isinstance(again.failure, SourceRunError)
    assert "was begun from run 'another'" in str(again.failure)


def test_the_second_run_needs_an_id_and_a_folder_of_its_own(tmp_path):
    first = FirstRun(tmp_path / "first")
    first.folder.write_endpoints(Endpoints(run="first"))
    with pytest.raises(ConfigError, match=r"run\.id: expected another id"):
        find_source(config_of("first", tmp_path / "b", run={"from_run": str(tmp_path / "first")}))
    with pytest.raises(ConfigError, match=r"run\.dir: expected another folder"):
        find_source(config_of("b", tmp_path / "first", run={"from_run": str(tmp_path / "first")}))
