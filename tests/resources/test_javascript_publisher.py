"""A prompt from a JavaScript client, with packages from npm: what docs/messages.md promises to other languages."""

import json
import shutil
import subprocess
from pathlib import Path

import anyio
import pytest

from broker.connect import connect
from broker.embedded import EmbeddedServer
from pipeline.log import RunLog
from schemas.payload import check_payload
from schemas.topics import PROMPT_PUBLISHED

pytestmark = pytest.mark.resources
EXAMPLE = Path(__file__).parents[2] / "examples" / "publish_prompt.mjs"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    if shutil.which("npm") is None:
        pytest.fail("expected npm on the PATH")
    folder = tmp_path_factory.mktemp("js")
    shutil.copy(EXAMPLE, folder)
    subprocess.run(
        ["npm", "install", "--silent", "nats", "@msgpack/msgpack", "hash-wasm"], cwd=folder, check=True, timeout=150
    )
    return folder / EXAMPLE.name


async def test_a_prompt_from_javascript_is_a_prompt(script, tmp_path):
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    try:
        async with connect(server.url, "r", server.connect_settings(), create=True) as broker:
            environment = {
                "PATH": str(Path(shutil.which("node")).parent),
                "NATS_TOKEN": server.token_file.read_text().strip(),
            }
            arguments = ["node", str(script), server.url, "r", "my stream", "row 1.5", "How much is 1 + 1? ü"]
            with anyio.fail_after(30):
                done = await anyio.run_process(arguments, env=environment)
            assert json.loads(done.stdout)["seq"] == 1
            message = await RunLog(broker).find(PROMPT_PUBLISHED, "my stream", "row 1.5")
            assert message.tags == ["js"]
            check_payload(message.prompt, message.prompt.inline)
            assert json.loads(bytes(message.prompt.inline)) == "How much is 1 + 1? ü"
            with anyio.fail_after(30):
                again = await anyio.run_process(arguments, env=environment, check=False)
            assert b"wrong last sequence" in again.stderr
    finally:
        await server.stop()
