"""A task group is entered by `async with`, never through an exit stack.

An exit stack that is cancelled while another of its contexts closes makes the cancellation its own context where a task group
raises it again (python/cpython's `_fix_exception_context`), and anyio then follows that chain for ever: the process spins instead of
ending.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("schemas", "broker", "pipeline", "stages", "ops")


def entered_through_a_stack(source: str) -> list[int]:
    """Lines of `….enter_async_context(….create_task_group())`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("enter_async_context"):
            found += [node.lineno for given in node.args if "create_task_group" in ast.unparse(given)]
    return found


def test_it_is_found() -> None:
    assert entered_through_a_stack(
        "async def f(s):\n    return await s.enter_async_context(anyio.create_task_group())"
    ) == [2]


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_does_it(room: str) -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / room).rglob("*.py")
        if (lines := entered_through_a_stack(path.read_text(encoding="utf-8")))
    }
    assert found == {}
