"""The receiver's own promises: what is announced, tried again, quarantined."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
from weights_case import Broadcast

from schemas.messages.engines import EngineState
from schemas.messages.rollout import FinishReason
from schemas.messages.training import WeightsManifest
from stages.engine.gate import GatedEngine
from stages.engine.scripted import ScriptedEngine
from stages.ports import (
    EngineHealth,
    EngineUnavailableError,
    GenerateRequest,
    SamplingSettings,
    SwapMode,
    TokenChunk,
)
from stages.weight_files.holds import READERS_FOLDER
from stages.weights.receive import STATE_LABEL


class FaultyEngine(ScriptedEngine):
    """Fails while it loads, or answers with something else than it should."""

    def __init__(self) -> None:
        super().__init__(lambda _prompt, _number: [258], keep_calls=True)
        self.load_fails = False
        self.answers: list[TokenChunk] | None = None
        self.hangs = False
        self.gate: anyio.Event | None = None

    async def load_weights(self, directory: str, version: int, mode: SwapMode) -> None:
        if self.load_fails:
            raise EngineUnavailableError("half of the tensors were copied")
        if self.gate is not None:
            await self.gate.wait()
        await super().load_weights(directory, version, mode)

    async def generate(self, request: GenerateRequest):
        if self.hangs:
            await anyio.sleep_forever()
        if self.answers is None:
            async for chunk in super().generate(request):
                yield chunk
        else:
            for chunk in self.answers:
                yield chunk


def chunk(
    *ids: int, version: int, logprob: float = -0.1, finish: FinishReason | None = FinishReason.STOP
) -> TokenChunk:
    return TokenChunk(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), logprob, dtype=np.float32),
        version=version,
        finish_reason=finish,
    )


async def ask(engine) -> list[int]:
    request = GenerateRequest(
        request_id="r", prompt_ids=np.zeros(2, np.int32), settings=SamplingSettings(max_new_tokens=4)
    )
    return [int(token) async for one in engine.generate(request) for token in one.token_ids]


async def test_every_new_version_is_probed_before_it_is_announced(broadcast: Broadcast) -> None:
    assert await broadcast.receiver.load(await broadcast.publish(1))
    (probe,) = broadcast.engine.requests
    assert (probe.settings.temperature, probe.settings.max_new_tokens, probe.min_version) == (0.0, 1, 1)
    assert [loaded.version for loaded in broadcast.said] == [1]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([chunk(5, version=1)], "expected a token of version 2, found one of 1"),
        ([chunk(5, version=2, logprob=float("nan"))], "log-probs"),
        ([chunk(version=2, finish=FinishReason.ABORT)], "without a token"),
    ],
)
async def test_an_engine_that_answers_wrongly_after_a_load_is_quarantined(
    broadcast: Broadcast, answers: list[TokenChunk], text: str
) -> None:
    engine = FaultyEngine()
    receiver = broadcast.new_receiver(engine)
    assert await receiver.load(await broadcast.publish(1))
    engine.answers = answers
    assert not await receiver.load(await broadcast.publish(2))
    assert receiver.state is EngineState.QUARANTINED
    assert text in broadcast.metrics.labels[STATE_LABEL]
    assert [loaded.version for loaded in broadcast.said] == [1]


async def test_an_engine_that_failed_half_way_is_shut_until_a_load_succeeds(broadcast: Broadcast) -> None:
    engine = FaultyEngine()
    gated = GatedEngine(engine)
    receiver = broadcast.new_receiver(engine)
    assert await receiver.load(await broadcast.publish(1))
    engine.load_fails = True
    assert not await receiver.load(await broadcast.publish(2))
    gated.be(EngineState(broadcast.states[-1][0]), broadcast.states[-1][1])
    with pytest.raises(EngineUnavailableError, match="quarantined: version 2: half of the tensors"):
        await ask(gated)
    assert not (await gated.health()).ready
    engine.load_fails = False
    assert await receiver.load(await broadcast.publish(3))
    gated.be(EngineState(broadcast.states[-1][0]), broadcast.states[-1][1])
    assert await ask(gated) == [258]
    assert STATE_LABEL not in broadcast.metrics.labels


async def test_a_probe_that_a_dead_engine_never_answers_quarantines_it(broadcast: Broadcast) -> None:
    engine = FaultyEngine()
    engine.hangs = True
    receiver = broadcast.new_receiver(engine, probe_deadline_s=0.01)
    assert not await receiver.load(await broadcast.publish(1))
    assert "not answered within 0.01 s" in broadcast.metrics.labels[STATE_LABEL]


async def test_a_busy_engine_is_not_quarantined_for_a_probe_that_waits_in_its_queue(broadcast: Broadcast) -> None:
    class Busy(FaultyEngine):
        async def health(self) -> EngineHealth:
            found = await super().health()
            return msgspec.structs.replace(found, num_running=64, num_waiting=9)

    engine = Busy()
    engine.hangs = True
    receiver = broadcast.new_receiver(engine, probe_deadline_s=0.01)
    assert await receiver.load(await broadcast.publish(1))


async def test_what_failed_is_tried_again_until_it_works(broadcast: Broadcast, wait_until) -> None:
    published = await broadcast.publish(1)
    path = Path(published.directory) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    receiver = broadcast.new_receiver(retry_s=0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receiver.run)
        receiver.offer(published)
        await wait_until(lambda: "weights_error" in broadcast.metrics.labels)
        path.write_bytes(data)
        await wait_until(lambda: broadcast.said)
        tasks.cancel_scope.cancel()
    assert "weights_error" not in broadcast.metrics.labels


async def test_a_lying_checksum_in_the_manifest_is_refused_from_the_store_too(
    broadcast: Broadcast, tmp_path: Path
) -> None:
    assert await broadcast.receiver.load(await broadcast.publish(1))
    published = await broadcast.publish(2)
    manifest = msgspec.msgpack.decode(await broadcast.payloads.get(published.manifest), type=WeightsManifest)
    manifest.tensors[1] = type(manifest.tensors[1])(
        *(getattr(manifest.tensors[1], name) for name in ("name", "dtype", "shape", "offset", "size_bytes")), "0" * 16
    )
    lying = msgspec.structs.replace(
        published,
        manifest=await broadcast.payloads.put(msgspec.msgpack.encode(manifest)),
        directory=str(tmp_path / "another-node"),
    )
    assert not await broadcast.receiver.load(lying)
    assert "tensor b: expected the checksum 0000000000000000" in broadcast.metrics.labels["weights_error"]
    assert (broadcast.loads, broadcast.engine.version) == ([1], 1)
    assert not list((tmp_path / "cache").glob("v0000002-g1")), "what was wrong is not kept"


async def test_a_version_that_lies_nowhere_is_refused_with_what_to_do(broadcast: Broadcast) -> None:
    published = msgspec.structs.replace(await broadcast.publish(1), directory="/nowhere/v0000001-g1", parts=None)
    assert not await broadcast.receiver.load(published)
    assert "training.weights_through_store" in broadcast.metrics.labels["weights_error"]


async def test_a_file_that_an_earlier_release_put_into_the_store_whole_is_still_read(
    broadcast: Broadcast, tmp_path: Path
) -> None:
    published = await broadcast.publish(1)
    (Path(published.directory) / "config.json").unlink()
    published = await broadcast.announce(1)
    data = (Path(published.directory) / "model.safetensors").read_bytes()
    old = msgspec.structs.replace(
        published, file=await broadcast.payloads.put(data), parts=None, directory=str(tmp_path / "another-node")
    )
    assert await broadcast.receiver.load(old)


async def test_an_announcement_is_taken_back_however_a_load_ends(broadcast: Broadcast) -> None:
    engine = FaultyEngine()
    receiver = broadcast.new_receiver(engine)
    for fails in (False, True):
        engine.load_fails = fails
        await receiver.load(await broadcast.publish(2 if fails else 1))
        assert [path.name for path in (Path(broadcast.dir) / READERS_FOLDER).iterdir()] == [".lock"]


async def test_an_engine_without_adapters_says_what_to_set(broadcast: Broadcast) -> None:
    published = msgspec.structs.replace(await broadcast.publish(1), adapter=True)
    assert not await broadcast.receiver.load(published)
    assert 'training.lora.publish = "merged"' in broadcast.metrics.labels["weights_error"]
