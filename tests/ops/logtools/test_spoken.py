"""A recorded call is read as a conversation, whoever wrote it down."""

import msgspec
import pytest

from ops.logtools.spoken import Spoken, spoken
from stages.gateway.conversation import Message, Tool, ToolCall
from stages.gateway.recording import RecordedCall


def as_read(recorded):
    return spoken(msgspec.json.decode(msgspec.json.encode(recorded)))


def test_what_the_gateway_wrote_down_is_read_in_order_with_tools_calls_and_the_answer():
    call = ToolCall(id="c1", name="run", arguments='{"command": "ls"}')
    recorded = RecordedCall(
        model="policy",
        tools=(Tool(name="run"),),
        messages=(
            Message(role="system", texts=("Be brief.",)),
            Message(role="user", texts=("one", "two")),
            Message(role="tool", texts=("no such file",), call_id="c0", is_error=True),
        ),
        answer=Message(role="assistant", texts=("I ", "look."), reasoning="hm", calls=(call,)),
    )
    assert as_read(recorded) == [
        Spoken(role="tools", text="run"),
        Spoken(role="system", text="Be brief."),
        Spoken(role="user", text="one\ntwo"),
        Spoken(role="tool c0 (error)", text="no such file"),
        Spoken(role="assistant", text="I look.", reasoning="hm", calls=['run({"command": "ls"})']),
    ]


def test_a_raw_prompt_is_read_before_its_answer():
    recorded = RecordedCall(text="Once upon", is_raw=True, answer=Message(role="assistant", texts=(" a time",)))
    assert [(said.role, said.text) for said in as_read(recorded)] == [("prompt", "Once upon"), ("assistant", " a time")]


@pytest.mark.parametrize(
    ("recorded", "read"),
    [
        (None, []),
        ([{"role": "user", "content": "hi", "name": "me"}], [Spoken(role="user", text="hi", extra='{"name":"me"}')]),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]}],
         [Spoken(role="user", text='hi\n{"type":"image"}')]),
        ("dropped", [Spoken(role="", text="dropped")]),
        ({"odd": 1}, [Spoken(role="", text='{"odd":1}')]),
    ],
)  # fmt: skip
def test_other_writers_messages_are_read_as_far_as_they_can_be(recorded, read):
    assert spoken(recorded) == read
