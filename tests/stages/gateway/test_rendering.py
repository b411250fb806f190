"""What follows an answer is found for any template, and equals what the template itself would render there."""

import jinja2
import numpy as np
import pytest
from gateway_fakes import IM_END, TOKENIZER, ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.gateway.conversation import Message, Tool, ToolCall
from stages.gateway.errors import InvalidRequestError
from stages.gateway.rendering import PromptRenderer, tool_schema
from stages.gateway.settings import ToolSchemas
from stages.ports import TemplateError

CHATML = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
# Drops the reasoning of answers before the last user message and opens the next one inside <think>, as thinking models do.
THINKING = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}"""
# Refuses results that no call stands before, and system messages that are not the first.
STRICT = """{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('a system message must come first') }}{%- endif -%}
{%- if m.role == 'tool' and not (messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool') -%}
{{ raise_exception('a result without a call') }}{%- endif -%}
[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
NO_END = "{%- for m in messages -%}{{ m.role }}: {{ m.content }}\n{% endfor -%}{%- if add_generation_prompt -%}assistant: {%- endif -%}"


class TemplateTokenizer(ByteTokenizer):
    """Bytes and special tokens behind a jinja template."""

    def __init__(self, source: str) -> None:
        env = jinja2.Environment(autoescape=False)  # noqa: S701 - prompts, no pages
        env.globals["raise_exception"] = self._refuse
        self._template = env.from_string(source)

    def _refuse(self, reason):
        raise TemplateError(reason)

    def render(self, messages, *, tools, add_generation_prompt):
        return self.encode(
            self._template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        )


TEXT = st.text(alphabet="ab \né<", max_size=6)
NEW = st.lists(
    st.builds(lambda text: Message(role="user", texts=(text,)), TEXT)
    | st.builds(
        lambda text, number: Message(role="tool", texts=(text,), call_id=f"t{number}"), TEXT, st.integers(0, 3)
    ),
    min_size=1,
    max_size=3,
).map(lambda found: tuple(sorted(found, key=lambda one: one.role)))


def _renderer(source):
    return PromptRenderer(TemplateTokenizer(source), ToolSchemas.VLLM)


@settings(deadline=None)
@given(NEW, TEXT, TEXT)
def test_prompt_answer_and_continuation_are_the_whole_conversation(new, asked, said):
    renderer = _renderer(CHATML)
    user = Message(role="user", texts=(asked,))
    answer = Message(role="assistant", texts=(said,))
    prompt = renderer.whole((user,), ())
    completion = TOKENIZER.encode(said + "<|im_end|>")
    whole = renderer.whole((user, answer, *new), ())
    assert np.concatenate((prompt, completion, renderer.continuation(new, ended=True))).tolist() == whole.tolist()
    cut = np.concatenate((prompt, completion[:-1], renderer.continuation(new, ended=False)))
    assert cut.tolist() == whole.tolist()


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_template_that_rewrites_former_answers_gives_the_same_continuation(role):
    new = (Message(role=role, texts=("next",), call_id="t1"),)
    shown = TOKENIZER.show(_renderer(THINKING).continuation(new, ended=True))
    assert shown == f"\n<|im_start|>{role}\nnext<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_results_come_with_calls_where_a_template_insists():
    new = (Message(role="tool", texts=("a",), call_id="t1"), Message(role="tool", texts=("b",), call_id="t2"))
    assert (
        TOKENIZER.show(_renderer(STRICT).continuation(new, ended=False))
        == "<|im_end|>[tool]a<|im_end|>[tool]b<|im_end|>[assistant]"
    )


def test_a_template_without_an_end_of_turn_is_continued_as_it_is():
    new = (Message(role="user", texts=("next",)),)
    assert TOKENIZER.show(_renderer(NO_END).continuation(new, ended=False)) == "\nuser: next\nassistant:"


def test_a_refusal_of_the_template_is_the_clients_fault():
    with pytest.raises(InvalidRequestError, match="system message must come first"):
        _renderer(STRICT).whole((Message(role="user"), Message(role="system")), ())


def test_arguments_reach_the_template_as_objects():
    call = ToolCall(id="t", name="f", arguments='{"b": 1, "a": "x"}')
    shown = TOKENIZER.show(_renderer(CHATML).whole((Message(role="assistant", texts=("ok",), calls=(call,)),), ()))
    assert '"arguments": {"a": "x", "b": 1}' in shown or '"arguments": {"b": 1, "a": "x"}' in shown


def test_tool_schemas_look_as_the_engines_own_servers_make_them():
    tool = Tool(name="f", parameters={"type": "object"})
    assert tool_schema(tool, ToolSchemas.VLLM)["function"] == {
        "name": "f",
        "description": None,
        "parameters": {"type": "object"},
    }
    assert list(tool_schema(tool, ToolSchemas.SGLANG)) == ["description", "name", "parameters", "strict"]
    assert tool_schema(tool, ToolSchemas.OPENAI)["function"] == {"name": "f", "parameters": {"type": "object"}}


def test_the_turns_end_is_never_sampled_and_rendered_both():
    new = (Message(role="user", texts=("x",)),)
    assert IM_END not in _renderer(CHATML).continuation(new, ended=True)[:1].tolist()
