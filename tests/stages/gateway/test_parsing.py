"""Sampled text to events: whatever the chunking, the whole is the same, and nothing is lost."""

import itertools
import json

import pytest
from gateway_fakes import TOKENIZER
from hypothesis import given
from hypothesis import strategies as st

from stages.gateway.answering import AnswerReader, Detokenizer, StopStrings
from stages.gateway.conversation import CallArguments, CallStarted, Reasoning, Text, Tool
from stages.gateway.parsing import output_parser
from stages.gateway.settings import ToolFormat

TOOLS = {
    "f": Tool(
        name="f", parameters={"type": "object", "properties": {"n": {"type": "integer"}, "o": {"type": "object"}}}
    )
}
PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "</", "<", "\n", "  ", "a", "é😀", "answer ",
        '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": "{}"}', '{"name": "f", "arguments": {"s": "</tool_call>"}}',
        "<function=f>\n<parameter=n>\n3\n</parameter>\n</function>", "{", '"', "\\",
        "<function=f>", "<parameter=s>", "</parameter>", "</function>",
    ]
)  # fmt: skip
OUTPUTS = st.lists(PIECES, max_size=12).map("".join)


def parser(form=ToolFormat.HERMES, *, opened=False, tools=TOOLS):
    number = iter(range(1000))
    return output_parser(form, tools=tools, reasoning=True, opened=opened, new_call_id=lambda: f"c{next(number)}")


def joined(events):
    """Neighbouring pieces of one kind as one."""
    out = []
    for event in events:
        kind = type(event)
        if out and kind in (Text, Reasoning) and type(out[-1]) is kind:
            out[-1] = kind(out[-1].text + event.text)
        else:
            out.append(event)
    return out


def parsed(text, form=ToolFormat.HERMES, cuts=(), **options):
    one = parser(form, **options)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    events = [event for a, b in itertools.pairwise(edges) for event in one.feed(text[a:b])]
    return joined([*events, *one.finish()])


@given(OUTPUTS, st.lists(st.integers(0, 400), max_size=20), st.sampled_from(ToolFormat), st.booleans())
def test_any_chunking_gives_the_same_events(text, cuts, form, opened):
    whole = parsed(text, form, opened=opened)
    assert parsed(text, form, cuts, opened=opened) == whole
    assert parsed(text, form, range(len(text)), opened=opened) == whole


@given(st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_text_without_tags_is_untouched(text):
    assert parsed(text) == ([Text(text)] if text else [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": </tool_call> tail',
        "<tool_call>",
        "before <tool_call>\n{",
    ],
)
def test_malformed_calls_become_text(text):
    assert parsed(text) == [Text(text)]


def test_arguments_keep_their_own_spelling():
    text = 'Look.\n<tool_call>\n{"name": "f", "arguments": {"b":  1 ,"a": "\\u00e9"}}\n</tool_call>'
    assert parsed(text) == [Text("Look."), CallStarted(0, "c0", "f"), CallArguments(0, '{"b":  1 ,"a": "\\u00e9"}')]


def test_a_closing_tag_inside_an_argument_does_not_end_the_call():
    text = '<tool_call>{"name": "f", "arguments": {"s": "a</tool_call>b"}}</tool_call>'
    assert parsed(text) == [CallStarted(0, "c0", "f"), CallArguments(0, '{"s": "a</tool_call>b"}')]


def test_parallel_calls_have_their_own_indices_and_ids():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = parsed(f"{call}\n{call}")
    assert [(event.index, event.id) for event in events if isinstance(event, CallStarted)] == [(0, "c0"), (1, "c1")]


def test_a_call_that_the_model_did_not_close_counts_when_it_is_whole():
    assert parsed('<tool_call>{"name": "f", "arguments": {}}')[0] == CallStarted(0, "c0", "f")


def test_coder_calls_are_typed_by_the_schema():
    text = '<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=o>\n{"x": [1]}\n</parameter>\n<parameter=s>\n a\nb \n</parameter>\n</function>\n</tool_call>'
    events = parsed(text, ToolFormat.QWEN3_CODER)
    assert events[1] == CallArguments(0, '{"n":3,"o":{"x":[1]},"s":" a\\nb "}')


CUT_OFF = "<tool_call>\n<function=f>\n<parameter=s>\nrm -rf /tmp/build\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("length", range(len("<tool_call>"), CUT_OFF.index("</function>") + len("</function>")))
def test_a_coder_call_that_was_cut_off_is_text(length):
    assert parsed(CUT_OFF[:length], ToolFormat.QWEN3_CODER) == [Text(CUT_OFF[:length])]


def test_a_coder_call_that_lacks_only_the_last_tag_is_whole():
    text = CUT_OFF[: -len("\n</tool_call>")]
    assert parsed(text, ToolFormat.QWEN3_CODER)[1] == CallArguments(0, '{"s":"rm -rf /tmp/build"}')


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f><parameter=s>x</function></tool_call>",
        "<tool_call><function=f><parameter=s>x</parameter></tool_call>",
        "<tool_call><function=f><parameter=n>3<parameter=o>{}</parameter></function></tool_call>",
        "<tool_call><function=f>words</function></tool_call>",
        "<tool_call><function=f><parameter=s>x</parameter>words</function></tool_call>",
    ],
)
def test_coder_calls_with_tags_left_open_or_words_between_are_text(text):
    good = "<tool_call><function=f></function></tool_call>"
    assert parsed(text + good, ToolFormat.QWEN3_CODER) == [
        Text(text),
        CallStarted(0, "c0", "f"),
        CallArguments(0, "{}"),
    ]


@pytest.mark.parametrize(
    "value", ["a</tool_call>b", "a</tool_call></tool_call>", "has <parameter=x> in it", "a</parameter>b", "</function>"]
)
def test_tags_inside_a_coder_value_are_part_of_it(value):
    text = f"<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call> tail"
    assert parsed(text, ToolFormat.QWEN3_CODER) == [
        CallStarted(0, "c0", "f"),
        CallArguments(0, json.dumps({"s": value}, separators=(",", ":"))),
        Text(" tail"),
    ]


@pytest.mark.parametrize("length", range(len("<tool_call>"), len('<tool_call>{"name": "f", "arguments": {"s": "a"}}')))
def test_a_json_call_that_was_cut_off_is_text(length):
    text = '<tool_call>{"name": "f", "arguments": {"s": "a"}}'[:length]
    assert parsed(text) == [Text(text)]


def test_reasoning_is_split_off_with_its_newlines():
    assert parsed("<think>\nhm\n\n</think>\n\n4") == [Reasoning("hm"), Text("4")]
    assert parsed("\nhm\n</think>\n\n4", opened=True) == [Reasoning("hm"), Text("4")]


def test_without_tools_a_call_is_text():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed(text, tools={}) == [Text(text)]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(1, 7))
def test_decoding_piece_by_piece_gives_the_whole_text(text, size):
    ids = TOKENIZER.encode(text)
    one = Detokenizer(TOKENIZER.decode)
    pieces = [one.feed(ids[at : at + size]) for at in range(0, ids.size, size)]
    assert "".join(pieces) + one.finish() == TOKENIZER.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.sampled_from(["a", "b", "ab", "ST", "OP", "STOP", "S"]), max_size=12))
def test_nothing_of_a_stop_string_is_given_out(pieces):
    stops = StopStrings(["STOP", "bS"])
    text = "".join(pieces)
    given_out = "".join(stops.feed(piece) for piece in pieces) + stops.finish()
    places = [text.find(stop) for stop in ("STOP", "bS") if stop in text]
    if stops.found is None:
        assert given_out == text
        assert not places
    else:
        # Found as early as the text allows: it is cut before the first of them that was whole.
        assert text.startswith(given_out + stops.found)


def test_a_stop_string_ends_the_reading():
    reader = AnswerReader(TOKENIZER, parser(), ("END",))
    for one in TOKENIZER.encode("abcENDxyz"):
        reader.feed(one.reshape(1))
        if reader.stop_string:
            break
    reader.finish()
    assert reader.message()[0].text == "abc"
    assert reader.stop_string == "END"
