"""A finished run in a folder: what sampling and reward mapping would have left there, without any model."""

from pathlib import Path

import msgspec
import numpy as np
from waiting import wait_until

from broker.api import Broker
from broker.connect import connect
from broker.embedded import EmbeddedServer
from ops.config import RunConfig, decode_config, fold_digest
from ops.connection import connect_to
from ops.run_folder import Endpoints, RunFolder, RunFolderError
from pipeline.log import RunLog
from schemas.arrays import bits, float32, int32, runs
from schemas.ids import group_id, row_id
from schemas.messages.rollout import EpisodeClass, Row, RowTokens, Trajectory
from schemas.messages.sampling import GroupIssued, RunStarted, Tick
from schemas.messages.training import Manifest, StepTrained
from schemas.topics import STEP_ASSEMBLED, STEP_TRAINED

SLOTS = 4
GROUPS_PER_STEP = 2


def config_of(name: str, folder: Path, **sections) -> RunConfig:
    tree = {
        "run": {"id": name, "dir": str(folder)},
        "streams": [{"name": "words", "stream_id": "words", "sampling_weight": 1.0}],
        "arena": {"url": "local"},
        "engine": {"kind": "scripted", "script": "nowhere:never"},
        "training": {"backend": "standin"},
        "sampling": {"groups_per_step": GROUPS_PER_STEP, "slots_per_group": SLOTS, "max_staleness": 1},
    }
    for key, section in sections.items():
        tree[key] = {**tree.get(key, {}), **section}
    return decode_config(tree)


class FirstRun:
    """A first run whose log the test writes itself, and whose server it starts and stops."""

    def __init__(self, folder: Path) -> None:
        self.config = config_of("first", folder)
        self.folder = RunFolder(folder)
        self.folder.create()
        self.folder.write_config(self.config)
        self.server = EmbeddedServer(self.folder.nats)

    def open(self):
        return connect(self.server.url, "first", self.server.connect_settings(), create=True)

    async def begin(self, *, steps: int | None) -> None:
        await self.server.start()
        self.folder.write_endpoints(
            Endpoints(run="first", broker_url=self.server.url, broker_login=self.server.connect_settings())
        )
        async with self.open() as broker:
            await RunLog(broker).publish(
                RunStarted(
                    ordinal=0,
                    config_json=msgspec.json.encode(self.config),
                    config_digest=fold_digest(self.config),
                    headrace_version="0",
                    steps=steps,
                )
            )

    async def sample(self, ordinals: range) -> None:
        """Whole groups of these ordinals; members of neighbouring groups come mixed."""
        async with self.open() as broker:
            run_log = RunLog(broker)
            for ordinal in ordinals:
                await run_log.publish(
                    GroupIssued(
                        group=group_id(ordinal), ordinal=ordinal, stream="words", data_id=str(ordinal), num_slots=SLOTS
                    )
                )
            for slot in range(SLOTS):
                for ordinal in ordinals:
                    await run_log.publish(await trajectory(broker, ordinal, slot))
            await run_log.publish(Tick(ordinal=ordinals.stop, period_s=1.0, unix_time_s=0.0))

    async def train(self, step: int) -> None:
        async with self.open() as broker:
            await RunLog(broker).publish(StepTrained(step=step, generation=1, digest="", manifest_id=""))


async def trajectory(broker: Broker, ordinal: int, slot: int) -> Trajectory:
    length = 6 + (ordinal * 5 + slot * 3) % 7
    tokens = RowTokens(
        token_ids=int32(np.arange(length) + ordinal * 3 + slot),
        loss_mask=bits(np.arange(length) >= 3),
        logprobs=float32(np.where(np.arange(length) >= 3, -0.5, 0.0)),
        versions=runs(np.where(np.arange(length) >= 3, ordinal // GROUPS_PER_STEP, -1)),
        turns=runs(np.where(np.arange(length) >= 3, 0, -1)),
    )
    reward = float((ordinal + slot) % 3)
    row = Row(
        row=row_id(group_id(ordinal), slot, 0),
        tokens=await broker.payloads.put(msgspec.msgpack.encode(tokens)),
        num_tokens=length,
        num_loss_tokens=length - 3,
        min_version=ordinal // GROUPS_PER_STEP,
        max_version=ordinal // GROUPS_PER_STEP,
        reward=reward,
    )
    return Trajectory(
        group=group_id(ordinal),
        slot=slot,
        attempt=0,
        session=f"s{ordinal}-{slot}",
        stream="words",
        data_id=str(ordinal),
        outcome=EpisodeClass.SCORED,
        rejected=False,
        rows=[row],
        score=reward,
        reward=reward,
        num_interactions=1,
        num_completion_tokens=length - 3,
    )


async def manifests_of(folder: Path, run: str) -> list[Manifest]:
    """The steps of a run that is over."""
    server = EmbeddedServer(folder / "nats")
    await server.start()
    try:
        async with (
            connect(server.url, run, server.connect_settings()) as broker,
            RunLog(broker).read([STEP_ASSEMBLED], follow=False) as entries,
        ):
            return [
                msgspec.msgpack.decode(await broker.payloads.get(entry.message.manifest), type=Manifest)
                async for entry in entries
            ]
    finally:
        await server.stop()


async def until_trained(folder: Path, step: int) -> None:
    """Return when a run that goes on has trained this step."""

    def read() -> Endpoints | None:
        try:
            return RunFolder(folder).read_endpoints()
        except RunFolderError:
            return None

    endpoints = await wait_until(read, f"the endpoints in {folder}", deadline_s=120, every_s=0.02)
    async with connect_to(endpoints, name="test") as broker, RunLog(broker).read([STEP_TRAINED]) as entries:
        async for entry in entries:
            if entry.message.step >= step:
                return
