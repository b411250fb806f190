"""`python -m ops.engines.cpu_environment`: make the environment, say where it is."""

import sys

from ops.engines.cpu_environment import CpuEnvironmentError, make_cpu_environment

try:
    made = make_cpu_environment()
except CpuEnvironmentError as error:
    sys.exit(str(error))
print(f"vLLM and SGLang for CPUs: {made.python}, stubs in {made.stubs}")  # noqa: T201 - a command's answer
