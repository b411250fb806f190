"""How tests wait for what no event tells."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio


async def wait_until(condition: Callable[[], object], what: str = "", *, deadline_s: float = 30.0) -> None:
    """Look again and again until a condition (a plain or async callable) holds.

    Args:
        what: what is waited for, in words for whoever reads that it did not come.
        deadline_s: far above what it takes; only a hang reaches it.

    Raises:
        AssertionError: it did not hold before the deadline.
    """
    with anyio.move_on_after(deadline_s):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await anyio.sleep(0.005)
    raise AssertionError(f"{what or condition}: not within {deadline_s:g} s")
