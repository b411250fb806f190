"""A RabbitMQ of one's own on loopback: own ports, own folder, no trace elsewhere. For tests, benches and chaos.

It needs an installed RabbitMQ (Debian: rabbitmq-server) whose own service may be off.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Final

import anyio

from broker.errors import ServerStartError

START_DEADLINE_S: Final = 90.0
_LAST_LINES: Final = 15


def find_server() -> Path | None:
    """The start script of an installed RabbitMQ: the real one, where a distribution wraps it for its own service user."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    if found:
        return found[-1]
    on_path = shutil.which("rabbitmq-server")
    return Path(on_path) if on_path else None


class LocalRabbit:
    """See the module. `start` may be called again after `kill`: it keeps its ports and its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder.absolute()
        self._ports: Final = _free_ports(3)
        self._process: subprocess.Popen[bytes] | None = None
        self._cookie: Final = secrets.token_hex(16)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"amqp://guest:guest@127.0.0.1:{self._ports[0]}/"

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._ports[0]

    @property
    def pid(self) -> int:
        """The process that leads the server's group."""
        if self._process is None:
            raise ServerStartError("the RabbitMQ was not started")
        return self._process.pid

    async def start(self) -> None:
        """Start, and wait until it answers.

        Raises:
            ServerStartError: none is installed, or it does not answer.
        """
        script = find_server()
        if script is None:
            raise ServerStartError(
                "expected an installed RabbitMQ (Debian: apt-get install rabbitmq-server), found none"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "plugins").write_text("[].")
        (self._folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self._ports[0]}\nvm_memory_high_watermark.absolute = 1GB\n"
            "disk_free_limit.absolute = 50MB\n"
        )
        self._process = self._spawn(script)
        with anyio.move_on_after(START_DEADLINE_S):
            while not await self._answers():
                if self._process.poll() is not None:
                    break
                await anyio.sleep(0.1)
            else:
                return
        raise ServerStartError(f"RabbitMQ does not answer; its last lines:\n{self._last_lines()}")

    def _spawn(self, script: Path) -> subprocess.Popen[bytes]:
        with (self._folder / "out.log").open("ab") as out:
            return subprocess.Popen(  # noqa: S603 - an installed server, no words of a user
                [str(script)],
                cwd=self._folder,  # where it leaves what it writes at a crash
                env=self._environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the server with all its helpers (SIGKILL), as a machine's death would."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def pause(self) -> None:
        """SIGSTOP."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.killpg(self.pid, signal.SIGCONT)

    def _environment(self) -> dict[str, str]:
        folder = self._folder
        amqp, dist, epmd = map(str, self._ports)
        home = folder / "home"
        home.mkdir(exist_ok=True)
        cookie = home / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(self._cookie)
            cookie.chmod(0o400)
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "RABBITMQ_NODENAME": f"headrace{amqp}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": amqp,
            "RABBITMQ_DIST_PORT": dist,
            "ERL_EPMD_PORT": epmd,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none",
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1",
        }

    async def _answers(self) -> bool:
        """Whether it speaks AMQP: the port opens before the server is ready."""
        try:
            with anyio.fail_after(1.0):
                async with await anyio.connect_tcp("127.0.0.1", self._ports[0]) as stream:
                    await stream.send(b"AMQP\x00\x00\x09\x01")
                    return bool(await stream.receive(1))
        except (OSError, TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError):
            return False

    def _last_lines(self) -> str:
        try:
            lines = (self._folder / "out.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return "(none)"
        return "\n".join(lines[-_LAST_LINES:])


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
