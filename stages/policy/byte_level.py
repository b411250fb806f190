"""The byte-level tokenizer of the built-in policy: every text comes back as it was. No torch, no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stages.policy.chat_template import CHAT_TEMPLATE

PAD: Final = "<|endoftext|>"
END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (PAD, "<|im_start|>", END)
MARKUP_TOKENS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|reserved|>")
"""Kept by `decode`, since parsers look for them. The reserved one makes the vocabulary 264, which 2, 4 and 8 divide."""


def byte_tokenizer() -> Tokenizer:
    """Byte-level without merges: every text comes back as it was; ids 0..255 are bytes, then the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    return tokenizer


def write_tokenizer_files(folder: str | Path, *, max_context: int) -> None:
    """A folder with the tokenizer and the chat template alone: all that a scripted engine needs of a policy."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {"eos_token": END, "pad_token": PAD, "model_max_length": max_context}
    (path / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
