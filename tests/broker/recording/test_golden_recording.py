"""A recording that an earlier version wrote stays readable: its messages, its payloads, and what they mean.

data/format-1.hrrec is never written anew. A new format or schema version gets a file of its own beside it.
"""

import json
from pathlib import Path

import msgspec
import pytest
import xxhash

from broker.recording import Recording
from broker.recording.references import PAYLOAD_TYPES, decoded_topic, named_in

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.hrrec")), ids=lambda path: path.stem)
def test_a_recording_of_each_former_version_is_read_whole(path):
    expected = json.loads(path.with_suffix(".json").read_text())
    hasher = xxhash.xxh3_64()
    with Recording(path) as recording:
        assert recording.verify() == []
        assert (recording.run, recording.header.schema_version) == (expected["run"], expected["schema_version"])
        assert (recording.num_messages, recording.num_payloads) == (expected["messages"], expected["payloads"])
        assert {name: topic.messages for name, topic in recording.topics().items()} == expected["topics"]
        for record in recording.records():
            hasher.update(f"{record.sequence} {record.subject} ".encode())
            hasher.update(record.data)
    assert hasher.hexdigest() == expected["digest"]


@pytest.mark.parametrize("path", sorted(DATA.glob("*.hrrec")), ids=lambda path: path.stem)
def test_its_messages_and_payloads_mean_something_to_this_version(path):
    with Recording(path) as recording:
        for record in recording.records():
            topic = decoded_topic(record.subject)
            message = topic.decode(record.data)
            for named in named_in(topic, message):
                data = recording.payload(named.ref)
                if named.path in PAYLOAD_TYPES:
                    msgspec.msgpack.decode(data, type=PAYLOAD_TYPES[named.path])
