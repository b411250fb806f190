"""A trainer that is killed or put to sleep at any instant: what survives is what an undisturbed one would have made."""

import os
import random
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import psutil
import pytest
from backend_case import Case, policy_folder, train_case
from loop_case import RUN, Place, publish_steps, trainer_process
from rank_processes import DEADLINE_S, nursery
from safetensors.numpy import load_file

from broker.connect import connect
from broker.embedded import embedded_server
from broker.topology import RunLimits
from ops.logtools.facts import StepFacts
from ops.logtools.sources import tell
from pipeline.generations import Generations
from pipeline.log import RunLog
from schemas.topics import STEP_TRAINED
from stages.training import lineage
from stages.training.ranks import single_rank

SMALL = RunLimits(log_max_bytes=64 * 2**20, payload_max_bytes=64 * 2**20, state_max_bytes=16 * 2**20)


class Trainer:
    """A trainer process and what it says."""

    def __init__(self, place: Place) -> None:
        context = nursery()
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=trainer_process, args=(theirs, place), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self):
        assert self.pipe.poll(DEADLINE_S), "the trainer says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)


@asynccontextmanager
async def a_run(tmp_path: Path, num_steps: int, **place):
    """A server with the run's steps on its log."""
    policy_folder(tmp_path)
    case = Case(folder=str(tmp_path), last_step=num_steps)
    async with (
        embedded_server(tmp_path / "nats") as server,
        connect(server.url, RUN, server.connect_settings(), create=True, limits=SMALL) as broker,
    ):
        await publish_steps(broker, case)
        yield broker, Place(url=server.url, token_file=str(server.token_file), case=case, **place)


def assert_weights_are_undisturbed(place: Place) -> None:
    """Every generation that reached the last step exported the same bits as one trainer alone."""
    case = place.case
    expected = train_case(single_rank(), case).weights
    folders = list(Path(case.folder, "weights").glob(f"v{case.last_step:07d}-g*"))
    assert folders
    for folder in folders:
        found = load_file(folder / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all((found[name] == expected[name]).all() for name in expected)


async def killed_again_and_again(tmp_path: Path, num_steps: int, num_kills: int, seed: int) -> None:
    draw = random.Random(seed)
    async with a_run(tmp_path, num_steps, checkpoint_every=2) as (_, place):

        def live_and_die() -> None:
            alive = 0
            for _ in range(num_kills):
                trainer = Trainer(place)
                trainer.hear()
                time.sleep(draw.uniform(0.0, 0.3))  # the instant is the point
                alive += trainer.process.is_alive()
                trainer.kill()
            last = Trainer(place)
            assert last.hear() == num_kills + 1
            assert last.hear() == "done"
            assert alive
            assert_weights_are_undisturbed(place)

        await anyio.to_thread.run_sync(live_and_die)


async def test_a_trainer_killed_at_random_instants_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    await killed_again_and_again(tmp_path, num_steps=12, num_kills=3, seed=1)


@pytest.mark.nightly
async def test_a_trainer_killed_at_twenty_random_instants_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    await killed_again_and_again(tmp_path, num_steps=60, num_kills=20, seed=2)


async def test_a_trainer_that_slept_past_its_lease_stops_and_spoils_nothing(tmp_path):
    async with a_run(tmp_path, 5, lease_s=1.0) as (broker, place):
        first = await anyio.to_thread.run_sync(Trainer, place)
        assert await anyio.to_thread.run_sync(first.hear) == 1
        async with RunLog(broker).read([STEP_TRAINED]) as entries:
            async for entry in entries:
                if entry.message.step == 2:
                    break
        os.kill(first.process.pid, signal.SIGSTOP)
        second = await anyio.to_thread.run_sync(Trainer, place)
        assert await anyio.to_thread.run_sync(second.hear) == 2
        assert await anyio.to_thread.run_sync(second.hear) == "done"
        os.kill(first.process.pid, signal.SIGCONT)
        said = await anyio.to_thread.run_sync(first.hear)
        assert said.startswith("LeaseLostError"), said
        async with RunLog(broker).read([STEP_TRAINED], follow=False) as entries:
            messages = [entry.message async for entry in entries]
        trained = [(message.step, message.generation, message.digest) for message in messages]
        assert (5, 2) in [(step, generation) for step, generation, _ in trained]
        digests = {step: {digest for s, _, digest in trained if s == step} for step, _, _ in trained}
        assert all(len(found) == 1 for found in digests.values())
        newest = lineage.standing(Path(place.case.folder) / "checkpoints")[-1].record
        assert (newest.step, newest.generation) == (5, 2)
        await anyio.to_thread.run_sync(assert_weights_are_undisturbed, place)
        await assert_another_goes_on(place, 3)


async def assert_another_goes_on(place: Place, generation: int) -> None:
    another = await anyio.to_thread.run_sync(Trainer, place)
    assert await anyio.to_thread.run_sync(another.hear) == generation
    assert await anyio.to_thread.run_sync(another.hear) == "done"


def stopped(trainer: Trainer) -> bool:
    """It has put itself to sleep."""
    return psutil.Process(trainer.process.pid).status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize("what", ["publish", "checkpoint"])
async def test_what_a_trainer_still_does_that_slept_after_its_last_look_at_the_lease_counts_for_nobody(tmp_path, what):
    async with a_run(tmp_path, 6, checkpoint_every=2) as (broker, place):
        asleep = msgspec.structs.replace(place, sleep_before=(what, 4))
        first = await anyio.to_thread.run_sync(Trainer, asleep)
        assert await anyio.to_thread.run_sync(first.hear) == 1
        with anyio.fail_after(DEADLINE_S):
            while not stopped(first):
                await anyio.sleep(0.02)
        second = await anyio.to_thread.run_sync(Trainer, place)
        assert await anyio.to_thread.run_sync(second.hear) == 2
        assert await anyio.to_thread.run_sync(second.hear) == "done"
        os.kill(first.process.pid, signal.SIGCONT)
        assert (await anyio.to_thread.run_sync(first.hear)).startswith("LeaseLostError")

        facts, generations = StepFacts(), Generations()
        async with broker.read([STEP_TRAINED.filter(RUN)], follow=False) as records:
            told = [tell(record) async for record in records]
        for one in told:
            facts.take(one)
        trained = [(one.message.step, one.message.generation) for one in told]
        heard = [(step, generation) for step, generation in trained if generations.admits(generation)]
        before = [(1, 1), (2, 1), (3, 1)] + ([(4, 1)] if what == "checkpoint" else [])
        assert heard == [*before, (3, 2), (4, 2), (5, 2), (6, 2)]
        if what == "publish":
            assert trained[-1] == (4, 1)
            assert [(at.message.step, at.message.generation) for at in facts.superseded] == [(4, 1)]
            assert facts.trained[4].message.generation == 2
        line = [(one.record.step, one.record.generation) for one in lineage.standing(checkpoints_of(place))]
        assert line == [(4, 2), (6, 2)]
        await anyio.to_thread.run_sync(assert_weights_are_undisturbed, place)
        await assert_another_goes_on(place, 3)


def checkpoints_of(place: Place) -> Path:
    return Path(place.case.folder) / "checkpoints"
