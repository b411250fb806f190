"""How tests wait for what no event tells."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio


async def wait_until(
    condition: Callable[[], object], what: str = "", *, deadline_s: float = 30.0, every_s: float = 0.005
) -> Any:
    """Look again and again until a condition (a plain or async callable) holds; what it gave then.

    Args:
        what: what is waited for, in words for whoever reads that it did not come.
        deadline_s: far above what it takes; only a hang reaches it.
        every_s: between looks; longer where a look costs something.

    Raises:
        AssertionError: it did not hold before the deadline.
    """
    with anyio.move_on_after(deadline_s):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return found
            await anyio.sleep(every_s)
    raise AssertionError(f"{what or condition}: not within {deadline_s:g} s")
