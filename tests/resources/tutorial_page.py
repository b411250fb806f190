"""Turns docs/tutorial.md into the shell script of somebody who types it, from top to bottom.

```python        whose first line is `# my_agent.py`: a file to be written
```bash          commands to be typed
```bash train    … which need torch
```bash exit=1   … whose last one ends with that code
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^# (\S+\.\w+)\n")
_HEAD = "set -euo pipefail\n"


def script(*, install: bool, train: bool, page: str | None = None) -> str:
    """The bash script of the page.

    Args:
        install: type the commands that make an environment, too.
        train: type what needs torch, too.
        page: another text than the tutorial's.
    """
    parts = [_HEAD]
    for language, options, body in FENCE.findall(PAGE.read_text(encoding="utf-8") if page is None else page):
        named = FILE.match(body)
        if language == "bash":
            if "train" in options.split() and not train:
                continue
            code = int(dict(re.findall(r"(\w+)=(\d+)", options)).get("exit", 0))
            parts += _typed(body, expected=code, installs=install)
        elif named:
            parts.append(f"cat > {named[1]} <<'END-OF-FILE'\n{body[named.end() :]}END-OF-FILE\n")
    return "".join(parts)


def _typed(body: str, *, expected: int, installs: bool) -> list[str]:
    lines = [line for line in body.splitlines() if line.strip() and (installs or line.startswith("headrace "))]
    typed = [f"echo {shlex.quote(f'$ {line}')}\n{line}\n" for line in lines]
    if expected and typed:
        typed[-1] = f"code=0\n{typed[-1].rstrip()} || code=$?\n[ $code -eq {expected} ]\n"
    return typed
