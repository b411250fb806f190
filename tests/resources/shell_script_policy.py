"""A scripted policy that solves tasks of the form `What is EXPRESSION ?` with shell commands, every other time wrongly.

For the scripted engine: prompt ids and the request's number → the ids of an answer with one call of the tool `bash`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer

from stages.policy.byte_level import END, byte_tokenizer
from stages.ports import TokenIds

_TASK = re.compile(r"What is ([0-9 +-]+) \?")


@cache
def _tokenizer() -> Tokenizer:
    return byte_tokenizer()


def add_in_the_shell(prompt_ids: TokenIds, number: int) -> Sequence[int]:
    """Write the sum to answer.txt, look at it, submit."""
    tokenizer = _tokenizer()
    text = tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
    # The system's and the user's messages come first, then each answer with its tool's result.
    turn = (text.count(END) - 2) // 2
    if turn == 0:
        found = _TASK.search(text)
        expression = found[1] if found else "0"
        command = f"printf %s $(({expression} + {number % 2})) > answer.txt"
    else:
        command = "cat answer.txt" if turn == 1 else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return tokenizer.encode(f"THOUGHT: go on.<tool_call>{call}</tool_call>{END}", add_special_tokens=False).ids
