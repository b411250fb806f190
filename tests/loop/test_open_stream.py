"""A run whose prompts arrive while it runs, from the command and from a bare NATS client."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import anyio
import msgspec
import nats

from broker.api import Broker
from broker.recording import Recording
from ops.config import sampling_settings
from ops.logtools.closing import close_stream
from ops.logtools.prompts import check_row, read_rows
from ops.logtools.publish import PublishFigures, Publishing, PublishSettings
from ops.logtools.recorded import recorded_config
from schemas.messages.sampling import GroupIssued
from schemas.payload import content_id
from schemas.topics import GROUP_ISSUED, RUN_FINISHED
from stages.sampling.fold import SamplingFold

ROOT = Path(__file__).parents[2]
OWN_AGENT = ROOT / "examples" / "own_agent.toml"
OPEN = ("--set", "streams.vowels.open=true", "--set", 'streams.vowels.rows=""')
SMALL = ("--set", "sampling.groups_per_step=2", "--set", "training.standin_step_s=0.0")


async def _publish(broker: Broker, rows: Path) -> PublishFigures:
    prompts = [check_row(row) for row in read_rows(str(rows))]
    return await Publishing(broker, PublishSettings(stream="vowels")).run(prompts)


async def _publish_without_headrace(url: str, token: str, data_id: str) -> None:
    """As any client in any language does it: docs/messages.md is all it knows."""
    prompt = json.dumps("a word").encode()
    ref = {"store": "inline", "id": content_id(prompt), "size_bytes": len(prompt), "inline": prompt}
    message = msgspec.msgpack.encode({"stream": "vowels", "data_id": data_id, "prompt": ref, "tags": ["bare"]})
    client = await nats.connect(url, token=token)
    headers = {"Nats-Msg-Id": uuid.uuid4().hex, "Nats-Expected-Last-Subject-Sequence": "0"}
    await client.jetstream().publish(f"hr.own-agent.prompt.published.vowels.{data_id}", message, headers=headers)
    await client.close()


async def test_prompts_that_arrive_while_a_run_goes_on_are_drawn_in_order_once(headrace, tmp_path) -> None:
    recording, rows = tmp_path / "open.hrrec", tmp_path / "two.jsonl"
    rows.write_text('{"id": "r0", "prompt": "river"}\n{"id": "r1", "prompt": "mill"}\n')
    async with headrace("--set", "run.steps=9", "--record", str(recording), *OPEN, *SMALL, config=OWN_AGENT) as run:
        endpoints = await run.wait_for_endpoints()
        async with run.broker() as broker:
            assert (await _publish(broker, rows)).published == 2
            await run.wait_for_step(1)
            assert (await _publish(broker, rows)).published == 0
            token = await anyio.Path(endpoints.broker_login.token_file).read_text()
            for number in range(2, 4):
                await _publish_without_headrace(endpoints.broker_url, token.strip(), f"r{number}")
            await run.wait_for_step(2)
            assert (await close_stream(broker, "vowels", weight=1.0)).rows == 4
        result = await run.result()
    assert (result["steps"], result["unexplained"], result["dead_letters"]) == (2, 0, 0)
    with Recording(recording) as recorded:
        issued = [GROUP_ISSUED.decode(one.data) for one in recorded.records([GROUP_ISSUED.filter("own-agent")])]
        assert [one.data_id for one in issued] == ["r0", "r1", "r2", "r3"]
        assert issued[-1].tags == ["bare"]
        assert bytes(recorded.payload(issued[0].prompt)) == b'"river"'
        finished = [RUN_FINISHED.decode(one.data) for one in recorded.records([RUN_FINISHED.filter("own-agent")])]
        assert [one.reason for one in finished] == ["streams"]
        assert _folded_again(recorded) == [one.data for one in recorded.records([GROUP_ISSUED.filter("own-agent")])]


def _folded_again(recorded: Recording) -> list[bytes]:
    fold = SamplingFold(sampling_settings(recorded_config(recorded)))
    state = fold.initial()
    topics = {topic.name: topic for topic in fold.consumes}
    made: list[bytes] = []
    for record in recorded.records([topic.filter(recorded.run) for topic in fold.consumes]):
        message = topics[".".join(record.subject.split(".")[2:4])].decode(record.data)
        made += [
            GROUP_ISSUED.encode(output.message)
            for output in fold.step(state, message)
            if isinstance(output.message, GroupIssued)
        ]
    return made
