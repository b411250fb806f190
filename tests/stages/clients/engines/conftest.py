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


def started(kind: EngineKind, versions, tmp_path_factory):
    from real_servers import real_server  # noqa: PLC0415 - same

    try:
        cpu_environment()
    except CpuEnvironmentError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return real_server(kind, versions[0], tmp_path_factory.mktemp("logs") / f"{kind}.log")


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
