"""Servers for the tests of this folder: started once, when the first test wants them."""

import os
import sys
from pathlib import Path

import pytest

from ops.engines.cpu_environment import CpuEnvironmentError, cpu_environment
from schemas.config import EngineKind

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def versions(tmp_path_factory) -> list[str]:
    """Model folders of one shape and different weights; servers start with the first."""
    from real_servers import make_versions  # noqa: PLC0415 - torch, only where weights are made

    return make_versions(tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="session")
def adapters(tmp_path_factory, versions) -> tuple[str, ...]:
    """Folders of different LoRA adapters on the first version."""
    from adapter_folders import write_adapter  # noqa: PLC0415 - torch, only where weights are made

    root = tmp_path_factory.mktemp("adapters")
    return tuple(write_adapter(root / f"a{seed}", versions[0], seed=seed) for seed in range(len(versions)))


def started(kind: EngineKind, versions, tmp_path_factory, adapter_targets: tuple[str, ...] = ()):
    from real_servers import real_server  # noqa: PLC0415 - same

    try:
        cpu_environment()
    except CpuEnvironmentError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    log_file = tmp_path_factory.mktemp("logs") / f"{kind}.log"
    return real_server(kind, versions[0], log_file, adapter_targets=adapter_targets)


@pytest.fixture(scope="session")
def vllm_url(versions, tmp_path_factory):
    with started(EngineKind.VLLM, versions, tmp_path_factory) as url:
        yield url


@pytest.fixture(scope="session")
def sglang_url(versions, tmp_path_factory):
    with started(EngineKind.SGLANG, versions, tmp_path_factory) as url:
        yield url


@pytest.fixture(params=[EngineKind.VLLM, EngineKind.SGLANG], ids=str)
def real(request) -> tuple[EngineKind, str]:
    """(kind, address) of each real server."""
    return request.param, request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=[EngineKind.VLLM, EngineKind.SGLANG], ids=str, scope="session")
def real_with_adapters(request, versions, tmp_path_factory):
    """(kind, address) of a real server of each kind that takes LoRA adapters."""
    from adapter_folders import TARGETS  # noqa: PLC0415 - torch

    with started(request.param, versions, tmp_path_factory, TARGETS) as url:
        yield request.param, url
