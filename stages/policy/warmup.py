"""A short supervised warm-up: what pretraining on text of mixed quality is to a large model, for a tiny one.

    right answers, until held-out ones are likely ──▶ a mixture of right and wrong ones, until they are unlikely enough

The policy then knows how to answer and rarely does, so that reinforcement learning starts from a known level whatever the
seed. Same inputs on the same number of threads, same folder, bit for bit; it is kept under a digest of all inputs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import msgspec
import numpy as np
import structlog
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from stages.learning import attention
from stages.learning.forward import PolicyForward
from stages.policy.demonstrations import Conversation
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.policy.tokenizer import FolderTokenizer, TokenizerError, load_tokenizer

log = structlog.get_logger("headrace.policy")

_FORMAT: Final = 2
"""Raised whenever the same inputs would give other weights."""
_UNLEARNING: Final = 0.25
"""Share of the learning rate with which mixed answers are taught: at the whole one the level falls past any target at once."""


class WarmUpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long and how hard the warm-up teaches."""

    skill: float = 0.9
    """Teach right answers until held-out ones have this probability (mean over conversations, the last answer, temperature 1)."""
    target: float = 0.1
    """Then teach mixed answers until it has fallen to this."""
    max_updates: int = 400
    """Of both parts together."""
    check_every: int = 4
    """Updates between two looks while right answers are taught. Unlearning takes a few updates: there each is looked at."""
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 0


class _Example(msgspec.Struct, frozen=True):
    tokens: list[int]
    answers: list[tuple[int, int]]
    """[start, end) of each answer with its stop token."""


def warm_policy_folder(
    cache: str | Path,
    spec: PolicySpec,
    settings: WarmUpSettings,
    right: Sequence[Conversation],
    mixed: Sequence[Conversation],
    held_out: Sequence[Conversation],
) -> Path:
    """The warmed policy's folder under `cache`, made now unless it was made before from the same inputs.

    Raises:
        TokenizerError: The conversations don't fit the chat template, or have no answers.
    """
    inputs = [_FORMAT, str(torch.__version__), spec, settings, right, mixed, held_out, torch.get_num_threads()]
    key = xxhash.xxh3_128_hexdigest(msgspec.json.encode(inputs, order="sorted"))
    target = Path(cache) / f"policy-{key}"
    if (target / "config.json").is_file():
        return target
    part = target.with_name(f".part-{target.name}-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        make_policy_folder(part, spec)
        _warm_up(part, settings, right, mixed, held_out)
        if not target.exists():
            part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _warm_up(
    folder: Path,
    settings: WarmUpSettings,
    right: Sequence[Conversation],
    mixed: Sequence[Conversation],
    held_out: Sequence[Conversation],
) -> None:
    tokenizer = load_tokenizer(folder)
    lessons = [[_example(tokenizer, conversation) for conversation in part] for part in (right, mixed)]
    judged = [_example(tokenizer, conversation) for conversation in held_out]
    attention.register()
    transformers_logging.disable_progress_bar()
    model = cast(
        "nn.Module",
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention.PACKED_ATTENTION
        ),
    )
    policy = PolicyForward(model)
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
    order = np.random.default_rng(settings.seed)
    level, part, update = 0.0, 0, 0
    while part < len(lessons) and update < settings.max_updates:
        update += 1
        chosen = order.integers(0, len(lessons[part]), size=settings.batch_size)
        logps = _answer_logprobs(policy, [lessons[part][i] for i in chosen])
        optimizer.zero_grad(set_to_none=True)
        (-logps.mean()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        if part or update % settings.check_every == 0:
            level = _level(policy, judged)
            if part:
                part += level <= settings.target
            elif level >= settings.skill:
                part = 1
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr * _UNLEARNING
    log.info("policy warmed up", updates=update, finished=part == len(lessons), answer_probability=round(level, 4))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _example(tokenizer: FolderTokenizer, conversation: Conversation) -> _Example:
    """Tokens of the whole conversation, and where the answers lie: after the prompt of the messages before each."""
    tokens: list[int] = []
    answers: list[tuple[int, int]] = []
    stop = tokenizer.stop_token_ids[0]
    for i, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render(conversation[:i], tools=None, add_generation_prompt=True).tolist()
        answer = [*tokenizer.encode(str(message["content"])).tolist(), stop]
        answers.append((len(prompt), len(prompt) + len(answer)))
        tokens = [*prompt, *answer]
    if not answers:
        raise TokenizerError("a warm-up conversation needs at least one assistant message")
    return _Example(tokens, answers)


def _answer_logprobs(policy: PolicyForward, examples: Sequence[_Example]) -> torch.Tensor:
    """Log-probs of all answers' tokens, in order: [N]."""
    layout = attention.pack_layout([len(example.tokens) for example in examples], torch.device("cpu"))
    targets: list[int] = []
    offset = 0
    for example in examples:
        targets += [offset + t for start, end in example.answers for t in range(start, end)]
        offset += len(example.tokens)
    tokens = torch.tensor([token for example in examples for token in example.tokens])
    logps, _ = policy(tokens, layout, torch.tensor(targets), 1.0)
    return logps


def _level(policy: PolicyForward, examples: Sequence[_Example]) -> float:
    """Mean probability of the last answers."""
    with torch.no_grad():
        logps = _answer_logprobs(policy, examples).tolist()
    total, offset = 0.0, 0
    for example in examples:
        lengths = [end - start for start, end in example.answers]
        offset += sum(lengths)
        total += float(np.exp(sum(logps[offset - lengths[-1] : offset])))
    return total / len(examples)
