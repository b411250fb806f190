"""The official SDKs against a real server: what they read is what was sampled, streaming and not."""

import anthropic
import openai
import pytest
from gateway_fakes import TOKENIZER, FakeEngine, house, served

from stages.gateway.settings import GatewaySettings

CALL_TEXT = (
    '<think>\nlet me see\n</think>\n\nChecking.\n<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "w", "parameters": SCHEMA}}]


async def assert_one_chain(home, session, count):
    """All calls extend each other, and what the engine got is what stands on the log."""
    records = home.recorder.interactions(session)
    assert [one.parent for one in records] == [None, *range(count - 1)]
    whole = await home.chain(session, count - 1)
    for request in home.engine.requests:
        assert whole[: request.prompt_ids.size] == request.prompt_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat_with_parallel_tools(stream):
    home = house(FakeEngine([CALL_TEXT, "Sunny in both."]))
    ticket = await home.gateway.open_session("s")
    async with served(home) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ticket.token) as client:
        messages = [{"role": "developer", "content": "sys"}, {"role": "user", "content": "weather?"}]

        async def ask():
            if not stream:
                done = await client.chat.completions.create(model="p", messages=messages, tools=CHAT_TOOLS)
                return done.choices[0].message, done.choices[0].finish_reason, done.usage
            async with client.chat.completions.stream(
                model="p", messages=messages, tools=CHAT_TOOLS, stream_options={"include_usage": True}
            ) as events:
                done = await events.get_final_completion()
            return done.choices[0].message, done.choices[0].finish_reason, done.usage

        said, finish, usage = await ask()
        assert finish == "tool_calls"
        assert said.content == "Checking."
        assert said.reasoning_content == "let me see"
        assert [call.function.arguments for call in said.tool_calls] == ['{"city":  "Paris"}', '{"city": "Köln"}']
        assert usage.completion_tokens == home.recorder.interactions("s")[0].num_completion
        messages.append(said.model_dump())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in said.tool_calls]
        said, finish, _ = await ask()
        assert (said.content, finish) == ("Sunny in both.", "stop")
    await assert_one_chain(home, "s", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages_with_parallel_tools(stream):
    home = house(FakeEngine([CALL_TEXT, "Sunny in both."]))
    ticket = await home.gateway.open_session("s")
    async with served(home) as url, anthropic.AsyncAnthropic(base_url=url, api_key=ticket.token) as client:
        messages = [{"role": "user", "content": "weather?"}]
        options = {"model": "p", "max_tokens": 500, "system": "sys", "messages": messages}
        options["tools"] = [{"name": "weather", "description": "w", "input_schema": SCHEMA}]

        async def ask():
            if not stream:
                return await client.messages.create(**options)
            async with client.messages.stream(**options) as events:
                return await events.get_final_message()

        said = await ask()
        assert [block.type for block in said.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in said.content[2:]] == [{"city": "Paris"}, {"city": "Köln"}]
        assert said.stop_reason == "tool_use"
        assert said.usage.output_tokens == home.recorder.interactions("s")[0].num_completion
        messages.append({"role": "assistant", "content": [block.model_dump() for block in said.content]})
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"} for block in said.content[2:]]
        messages.append({"role": "user", "content": results})
        said = await ask()
        assert [block.text for block in said.content] == ["Sunny in both."]
        counted = await client.messages.count_tokens(model="p", messages=[{"role": "user", "content": "x"}])
        assert counted.input_tokens == TOKENIZER.encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n").size
        assert (await client.models.list()).data[0].id == "policy"
    await assert_one_chain(home, "s", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses_with_whole_input(stream):
    home = house(FakeEngine([CALL_TEXT, "Sunny in both."]))
    ticket = await home.gateway.open_session("s")
    async with served(home) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ticket.token) as client:
        sent = [{"role": "user", "content": "weather?"}]
        options = {"model": "p", "instructions": "sys", "store": False, "include": ["reasoning.encrypted_content"]}
        options["tools"] = [{"type": "function", "name": "weather", "parameters": SCHEMA}]

        async def ask():
            if not stream:
                return await client.responses.create(input=sent, **options)
            async with client.responses.stream(input=sent, **options) as events:
                return await events.get_final_response()

        said = await ask()
        assert [item.type for item in said.output] == ["reasoning", "message", "function_call", "function_call"]
        assert said.output_text == "Checking."
        sent += [item.model_dump(exclude_unset=True) for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        sent += [{"type": "function_call_output", "call_id": one.call_id, "output": "sunny"} for one in calls]
        said = await ask()
        assert (said.status, said.output_text) == ("completed", "Sunny in both.")
    await assert_one_chain(home, "s", 2)


async def test_openai_responses_by_previous_response_id():
    home = house(FakeEngine(["One.", "Two."]))
    ticket = await home.gateway.open_session("s")
    async with served(home) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ticket.token) as client:
        first = await client.responses.create(model="p", input="count")
        second = await client.responses.create(model="p", input="next", previous_response_id=first.id)
        assert (first.output_text, second.output_text) == ("One.", "Two.")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="p", input="next", previous_response_id="resp_other")
    await assert_one_chain(home, "s", 2)


async def test_openai_text_completions_extend_by_text():
    home = house(FakeEngine(["one two", " four"]))
    ticket = await home.gateway.open_session("s")
    async with served(home) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ticket.token) as client:
        first = await client.completions.create(model="p", prompt="count: ", max_tokens=50, logprobs=0)
        text = "count: " + first.choices[0].text + " three"
        pieces = [
            chunk.choices[0].text
            async for chunk in await client.completions.create(model="p", prompt=text, max_tokens=50, stream=True)
        ]
    assert first.choices[0].text == "one two"
    assert "".join(pieces) == " four"
    assert len(first.choices[0].logprobs.token_logprobs) == first.usage.completion_tokens
    await assert_one_chain(home, "s", 2)


async def test_several_choices_are_recorded_each_and_are_no_retries():
    home = house(FakeEngine(["a", "b", "c"]))
    ticket = await home.gateway.open_session("s")
    async with served(home) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ticket.token) as client:
        done = await client.chat.completions.create(model="p", messages=[{"role": "user", "content": "x"}], n=3)
    assert sorted(choice.message.content for choice in done.choices) == ["a", "b", "c"]
    records = home.recorder.interactions("s")
    assert len({one.digest for one in records}) == len({one.interaction_id for one in records}) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_overflow_is_typed_in_each_protocol(stream):
    home = house(FakeEngine(["x"]), context_length=64)
    ticket = await home.gateway.open_session("s")
    long = [{"role": "user", "content": "word " * 50}]
    async with served(home) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ticket.token) as client:
            with pytest.raises(openai.BadRequestError) as chat:
                await client.chat.completions.create(model="p", messages=long, stream=stream)
            with pytest.raises(openai.BadRequestError) as response:
                await client.responses.create(model="p", input="word " * 50, stream=stream)
        async with anthropic.AsyncAnthropic(base_url=url, api_key=ticket.token) as client:
            with pytest.raises(
                anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > 63 maximum"
            ) as message:
                await client.messages.create(model="p", messages=long, max_tokens=9, stream=stream)
    assert chat.value.code == response.value.code == "context_length_exceeded"
    assert message.value.body["error"]["code"] == "context_length_exceeded"
    closed = await home.gateway.close_session("s")
    assert (closed.num_interactions, closed.context_overflow, closed.system_error) == (0, True, "")


async def test_the_sdks_do_not_retry_a_call_after_the_end():
    home = house(FakeEngine(["x"]))
    ticket = await home.gateway.open_session("s")
    await home.gateway.close_session("s")
    async with served(home) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ticket.token) as client:
            with pytest.raises(openai.APIStatusError) as chat:
                await client.chat.completions.create(model="p", messages=[{"role": "user", "content": "x"}])
        async with anthropic.AsyncAnthropic(base_url=url, api_key=ticket.token) as client:
            with pytest.raises(anthropic.APIStatusError) as message:
                await client.messages.create(model="p", messages=[{"role": "user", "content": "x"}], max_tokens=9)
    assert chat.value.status_code == message.value.status_code == 410
    assert home.gateway.sessions.late_calls == 2


def test_settings_do_not_show_their_keys():
    settings = GatewaySettings(name="g", context_length=9, control_key="secret-1", generation_keys=("secret-2",))
    assert "secret" not in repr(settings)
