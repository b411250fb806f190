"""A fake server (`fake_server_process.py`) with two children that ignore SIGTERM and the death of their parent, as engines' own workers do.

    python fake_server_family.py MARK --model FOLDER --port PORT …

MARK stands in the command line of all three.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SERVER = Path(__file__).with_name("fake_server_process.py")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"

if __name__ == "__main__":
    for _ in range(2):
        subprocess.Popen([sys.executable, "-c", STUBBORN, sys.argv[1]], stdout=subprocess.DEVNULL)
    os.execv(sys.executable, [sys.executable, str(SERVER), *sys.argv[2:], "--mark", sys.argv[1]])  # noqa: S606 - so that the two are its own children
