"""A newcomer's path: a fresh clone of this repository, and docs/tutorial.md typed into it from top to bottom.

    python tests/resources/newcomer.py              # 2 GB of packages where pip has none of them in its cache
    python tests/resources/newcomer.py --no-train   # without what needs torch

Only what is committed is cloned. The folder is kept when a command fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tutorial_page import script

ROOT = Path(__file__).parents[2]
_OF_OUR_ENVIRONMENT = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")


def main() -> int:
    """Clone, type, tell; the exit code of the first command that failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-train", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-newcomer-"))
    clone = folder / "headrace"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in _OF_OUR_ENVIRONMENT}
    ours = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join(part for part in environment["PATH"].split(os.pathsep) if part != ours)
    typed = script(install=True, train=not options.no_train)
    done = subprocess.run(["bash", "-c", typed], cwd=clone, env=environment, check=False)
    if done.returncode:
        sys.stderr.write(f"a command of the tutorial ended with {done.returncode}; everything is in {clone}\n")
    else:
        shutil.rmtree(folder)
        sys.stdout.write("the tutorial holds from top to bottom\n")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
