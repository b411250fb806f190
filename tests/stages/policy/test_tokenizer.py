"""The torch-free tokenizer against transformers' on the same folder."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from stages.policy.tiny import PolicySpec, byte_tokenizer, make_policy_folder
from stages.policy.tokenizer import TokenizerError, load_tokenizer

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "héllo"}, {"type": "text", "text": " wörld"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "seen"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "and?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    make_policy_folder(path, PolicySpec(hidden_size=32, num_layers=1))
    return path


@given(st.text())
def test_every_text_comes_back(text):
    encoder = byte_tokenizer()
    assert encoder.decode(encoder.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("start", [0, 1])
def test_rendering_equals_transformers(folder, tools, prompt, start):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    found = ours.render(MESSAGES[start:], tools=tools, add_generation_prompt=prompt)
    text = theirs.apply_chat_template(MESSAGES[start:], tools=tools, add_generation_prompt=prompt, tokenize=False)
    assert found.tolist() == theirs.encode(text, add_special_tokens=False)
    assert found.dtype == np.int32
    assert ours.vocab_size == len(theirs) == 264
    assert ours.stop_token_ids == (theirs.eos_token_id,)


def test_every_id_is_inside_the_vocabulary_though_ids_have_gaps(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    Tokenizer(WordLevel({"a": 0, "b": 9}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.encode("b").tolist(), tokenizer.vocab_size) == ([9], 10)


@pytest.mark.parametrize("length", range(1, len(MESSAGES)))
def test_a_longer_conversation_extends_a_shorter_one(folder, length):
    tokenizer = load_tokenizer(folder)
    prompt = MESSAGES[length]["role"] == "assistant"
    short = tokenizer.render_text(MESSAGES[:length], tools=TOOLS, add_generation_prompt=prompt)
    assert tokenizer.render_text(MESSAGES, tools=TOOLS, add_generation_prompt=False).startswith(short)


def test_decoding_leaves_special_tokens_out_and_keeps_markup(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("<tool_call>{é}</tool_call><|im_end|>")) == "<tool_call>{é}</tool_call>"


def test_a_folder_without_a_template_is_refused(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(TokenizerError, match="chat template"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "nowhere")


def test_it_needs_neither_torch_nor_transformers():
    code = "import sys, stages.policy.tokenizer; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
