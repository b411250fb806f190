"""A tiny Qwen3 policy as an ordinary HF folder: seeded weights, byte tokenizer, chat template.

vLLM, SGLang and transformers load it as any other model.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stages.policy.byte_level import END, PAD, byte_tokenizer
from stages.policy.chat_template import CHAT_TEMPLATE


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of a tiny policy and its seed."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    """vLLM and SGLang want one of 32, 64, 80, 96, 112, 128 …"""
    max_context: int = 1024
    rope_theta: float = 10_000.0
    init_std: float = 0.06
    """Of a normal distribution. At this width transformers' usual 0.02 makes attention circuits form several times later."""
    seed: int = 0


def make_policy_folder(folder: str | Path, spec: PolicySpec) -> None:
    """Write the folder: config, generation config, safetensors, tokenizer, chat template. Same spec, same bytes."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token=END, pad_token=PAD, model_max_length=spec.max_context
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    end, pad = (int(str(tokenizer.convert_tokens_to_ids(token))) for token in (END, PAD))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
        dtype="float32",
        initializer_range=spec.init_std,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = pad
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
