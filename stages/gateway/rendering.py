"""Conversations to token ids, once: whole prompts for new chains, and only what is new for calls that extend one.

The new part is found without trusting any template's internals: the new messages are rendered behind two stand-in answers that
differ in one character; what both renderings share at the end is exactly what follows an answer. Sampled text is never encoded.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stages.gateway.conversation import Call, Message, Tool
from stages.gateway.errors import InvalidRequestError
from stages.gateway.forest import Match, new_messages
from stages.gateway.matching import parse_object
from stages.gateway.settings import ToolSchemas
from stages.ports import TemplateError, TokenIds, Tokenizer

_STAND_INS: Final = ("x", "y")


class PromptRenderer:
    """Renders with the policy's own chat template."""

    def __init__(self, tokenizer: Tokenizer, tool_schemas: ToolSchemas) -> None:
        self._tokenizer = tokenizer
        self._schemas = tool_schemas
        self._stops: Final = np.asarray(tokenizer.stop_token_ids, dtype=np.int32)

    def whole(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> TokenIds:
        """The prompt of a new chain, [P] int32.

        Raises:
            InvalidRequestError: the template refuses the conversation.
        """
        return self._render(
            [template_message(one) for one in messages], [tool_schema(one, self._schemas) for one in tools]
        )

    def continuation(self, new: tuple[Message, ...], *, ended: bool) -> TokenIds:
        """What follows a recorded answer: the end of its turn (unless `ended`: it sampled that itself), the new messages, and the
        beginning of the next answer.

        Raises:
            InvalidRequestError: the template refuses the new messages.
        """
        messages = [template_message(one) for one in new]
        shared = self._after_stand_in(messages, calls=True)
        stops = np.flatnonzero(np.isin(shared, self._stops))
        if not stops.size:
            # Nothing marks the end of a turn: what follows the bare text of an answer is all that is new.
            return self._after_stand_in(messages, calls=False)
        turn_end = int(stops[0])
        return shared[turn_end + 1 :] if ended else shared[turn_end:]

    def new_ids(self, call: Call, match: Match) -> TokenIds:
        """The ids of a call that its chain does not hold yet.

        Raises:
            InvalidRequestError: the template refuses the conversation, or a raw prompt is empty or holds ids outside the vocabulary.
        """
        if isinstance(call.prompt, str):
            ids = self._tokenizer.encode(call.prompt[match.num_known :])
        elif call.prompt is not None:
            ids = np.asarray(call.prompt[match.num_known :], dtype=np.int32)
            if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
                raise InvalidRequestError(
                    f"prompt: expected token ids in 0..{self._tokenizer.vocab_size - 1}, found {int(ids.max())}; "
                    "encode the text with the policy's own tokenizer"
                )
        elif match.parent is not None:
            return self.continuation(new_messages(call, match), ended=match.parent.ended)
        else:
            return self.whole(call.messages, call.tools)
        if not ids.size and match.parent is None:
            raise InvalidRequestError("prompt: expected at least one token, found none")
        return ids

    def _after_stand_in(self, messages: list[dict[str, object]], *, calls: bool) -> TokenIds:
        one, other = (self._render([*_stand_in(text, messages if calls else []), *messages], []) for text in _STAND_INS)
        return _shared_suffix(one, other)

    def _render(self, messages: list[dict[str, object]], tools: list[dict[str, object]]) -> TokenIds:
        try:
            return self._tokenizer.render(messages, tools=tools or None, add_generation_prompt=True)
        except (TemplateError, RecursionError) as error:
            raise InvalidRequestError(f"the policy's chat template refuses this conversation: {error}") from error


def template_message(message: Message) -> dict[str, object]:
    """A message as chat templates take it: OpenAI form, arguments as dicts."""
    rendered: dict[str, object] = {"role": message.role, "content": message.text}
    if message.role == "tool":
        rendered["tool_call_id"] = message.call_id
    if message.reasoning:
        rendered["reasoning_content"] = message.reasoning
    if message.calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.calls
        ]
    return rendered


def tool_schema(tool: Tool, style: ToolSchemas) -> dict[str, object]:
    """A tool as the named engine's chat server would hand it to the template."""
    if style is ToolSchemas.SGLANG:
        return {"description": tool.description, "name": tool.name, "parameters": tool.parameters, "strict": False}
    function: dict[str, object] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if style is ToolSchemas.OPENAI:
        function = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": function}


def _arguments(text: str) -> dict[str, object] | str:
    value = parse_object(text or "{}")
    return text if value is None else value


def _stand_in(text: str, following: list[dict[str, object]]) -> list[dict[str, object]]:
    answer: dict[str, object] = {"role": "assistant", "content": text}
    results = [one["tool_call_id"] for one in following if one["role"] == "tool"]
    if results:
        # Some templates refuse results without calls. The difference then sits in the last call: the turn's end comes after it.
        answer["tool_calls"] = [
            {"id": one, "type": "function", "function": {"name": text, "arguments": {}}} for one in results
        ]
    return [{"role": "user", "content": "-"}, answer]


def _shared_suffix(one: TokenIds, other: TokenIds) -> TokenIds:
    length = min(one.size, other.size)
    differs = np.flatnonzero(one[-length:] != other[-length:])
    return one[-length:][int(differs[-1]) + 1 :] if differs.size else one[-length:]
