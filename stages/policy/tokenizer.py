"""The port `Tokenizer` over an ordinary HF folder, with `tokenizers` and jinja2 alone.

Imports neither torch nor transformers: a gateway in front of remote engines needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import msgspec
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Encoder

from stages.ports import TemplateError, TokenIds


class TokenizerError(TemplateError):
    """A tokenizer folder can't be used, or messages don't fit its chat template."""


class FolderTokenizer:
    """Text and messages to ids and back, as the HF folder says."""

    def __init__(
        self, encoder: Encoder, template: jinja2.Template, specials: Mapping[str, str], stops: Sequence[int]
    ) -> None:
        self._encoder = encoder
        self._template = template
        self._specials = dict(specials)
        self._stops = tuple(stops)
        self._vocab_size = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included: ids may have gaps."""
        return self._vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        return self._stops

    def render(
        self, messages: list[dict[str, object]], *, tools: list[dict[str, object]] | None, add_generation_prompt: bool
    ) -> TokenIds:
        """Chat messages (OpenAI form, arguments as dicts) to ids, [P] int32.

        Raises:
            TokenizerError: The template refuses the messages.
        """
        return self.encode(self.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def render_text(
        self, messages: list[dict[str, object]], *, tools: list[dict[str, object]] | None, add_generation_prompt: bool
    ) -> str:
        """The same as text: what the model reads."""
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._specials
            )
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> TokenIds:
        """Text to ids, [n] int32; nothing is added."""
        return np.asarray(self._encoder.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: TokenIds) -> str:
        """Text of sampled ids, special tokens left out."""
        return str(self._encoder.decode([int(i) for i in token_ids], skip_special_tokens=True))


def load_tokenizer(folder: str | Path) -> FolderTokenizer:
    """Read a HF folder's tokenizer.json, chat template and stop ids.

    Raises:
        TokenizerError: A file is missing or damaged, or there is no chat template.
    """
    path = Path(folder)
    if not (path / "tokenizer.json").is_file():
        raise TokenizerError(f"expected {path / 'tokenizer.json'}: give a HF model folder with a fast tokenizer")
    try:
        encoder = Encoder.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{path / 'tokenizer.json'} can't be read: {error}") from error
    settings = _json_object(path / "tokenizer_config.json")
    specials = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    template = _template(path, settings)
    stops = _stop_ids(path, encoder, specials["eos_token"])
    return FolderTokenizer(encoder, template, {k: v for k, v in specials.items() if v}, stops)


def _json_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except msgspec.DecodeError as error:
        raise TokenizerError(f"{path} holds no JSON object: {error}") from error


def _token_text(value: object) -> str:
    """A special token is written as text or as an object with `content`."""
    if isinstance(value, Mapping):
        return str(value.get("content", ""))
    return "" if value is None else str(value)


def _template(path: Path, settings: Mapping[str, object]) -> jinja2.Template:
    file = path / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named ones: the one called "default"
        source = next((t["template"] for t in source if isinstance(t, Mapping) and t.get("name") == "default"), None)
    if not isinstance(source, str):
        raise TokenizerError(f"{path} has no chat template (chat_template.jinja, or chat_template in its config)")
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = _tojson
    try:
        return env.from_string(source, globals={"raise_exception": _refuse, "strftime_now": _now})
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template of {path} is broken: {error}") from error


def _tojson(value: object, indent: int | None = None, *, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _refuse(reason: str) -> str:
    raise jinja2.TemplateError(reason)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def _stop_ids(path: Path, encoder: Encoder, eos: str) -> tuple[int, ...]:
    """Stop ids of generation_config.json, then config.json, then the tokenizer's eos."""
    for name in ("generation_config.json", "config.json"):
        value = _json_object(path / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(str(i)) for i in value)
    token = encoder.token_to_id(eos) if eos else None
    return () if token is None else (int(token),)
