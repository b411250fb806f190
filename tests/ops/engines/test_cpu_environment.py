"""The CPU environment as a recipe: what is kept, what is made again. The real one is made in CI and used by the resource tests."""

import os
import subprocess
import sys

import msgspec
import pytest

from ops.engines.cpu_environment import CpuEnvironmentError, cpu_environment, make_cpu_environment, recipe, write_stubs


def test_an_environment_that_was_not_made_says_what_to_run(tmp_path):
    with pytest.raises(CpuEnvironmentError, match=r"found none; run `python -m ops\.engines\.cpu_environment`"):
        cpu_environment(tmp_path)


def test_one_that_was_made_to_its_end_is_found_and_not_made_again(tmp_path):
    (tmp_path / "made.json").write_bytes(msgspec.json.encode({"recipe": recipe()}))
    said = []
    assert make_cpu_environment(tmp_path, said.append) == cpu_environment(tmp_path)
    assert not said
    (tmp_path / "made.json").write_bytes(msgspec.json.encode({"recipe": "other"}))
    with pytest.raises(CpuEnvironmentError, match="another recipe"):
        cpu_environment(tmp_path)


def test_stubs_can_be_imported_and_not_called(tmp_path):
    write_stubs(tmp_path / "stubs")
    program = """
import importlib.metadata, sgl_kernel, torchvision
from torchvision.transforms.functional import InterpolationMode
from torchvision.io import decode_jpeg
print(importlib.metadata.version("torchvision"), importlib.metadata.version("sglang-kernel"), {InterpolationMode.BICUBIC: 1})
try:
    from sgl_kernel.scalar_type import scalar_types
except ImportError:
    print("no modules")
for call in (sgl_kernel.rmsnorm, decode_jpeg):
    try:
        call(1)
    except RuntimeError as error:
        print(error)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "stubs" / "sglang")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert done.stdout.startswith("0.28.0 0.4.9 ")
    assert "no modules" in done.stdout
    assert done.stdout.count("stand-in") == 2
