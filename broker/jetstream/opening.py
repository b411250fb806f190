"""Making a connection: which servers, with which credentials, and one clear line when it can't be made."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypedDict

import anyio
import nats.errors

from broker.errors import NotConnectedError
from broker.jetstream.link import Link
from broker.jetstream.wire import WireClient, check_client
from broker.settings import ConnectSettings, read_secret
from broker.tls import tls_context


@asynccontextmanager
async def open_link(urls: list[str], settings: ConnectSettings, *, role: str = "") -> AsyncGenerator[Link]:
    """A connection to one of `urls`, for as long as the context is open.

    Raises:
        NotConnectedError: none of them within the deadline, or the credentials were refused.
    """
    check_client()
    client = WireClient()
    name = f"{settings.name} {role}".strip()
    link = Link(client, settings, name)
    await _connect(link, urls, settings, name)
    try:
        await link.start()
        yield link
    finally:
        link.stop()
        await _close(client, 2.0)


async def _connect(link: Link, urls: list[str], settings: ConnectSettings, name: str) -> None:
    options = _auth_options(settings)
    try:
        with anyio.fail_after(settings.connect_deadline_s):
            await link.client.connect(
                servers=urls,
                name=name,
                error_cb=link.failed,
                disconnected_cb=link.disconnected,
                reconnected_cb=link.reconnected,
                connect_timeout=2,
                max_reconnect_attempts=-1,
                reconnect_time_wait=settings.reconnect_wait_s,  # pyright: ignore[reportArgumentType] - a float sleeps as well
                ping_interval=settings.ping_interval_s,  # pyright: ignore[reportArgumentType] - same
                max_outstanding_pings=2,
                inbox_prefix=settings.inbox_prefix,
                pending_size=64 * 1024 * 1024,
                **options,
            )
    except TimeoutError as error:
        await _close(link.client, 1.0)
        raise NotConnectedError(
            f"expected a NATS server at {', '.join(map(_without_secret, urls))} within {settings.connect_deadline_s} s, "
            f"found: {link.state().last_error or 'no answer'}"
        ) from error
    except ImportError as error:
        await _close(link.client, 1.0)
        raise NotConnectedError("credentials and nkeys need the package nkeys: pip install nkeys") from error
    except (nats.errors.Error, OSError, ValueError) as error:
        await _close(link.client, 1.0)
        raise NotConnectedError(f"can't connect to {', '.join(map(_without_secret, urls))}: {error}") from error
    except BaseException:
        await _close(link.client, 1.0)
        raise
    await link.connected()


async def _close(client: WireClient, deadline_s: float) -> None:
    """Send what is queued and close. A connection that breaks meanwhile is closed, too."""
    # RuntimeError is uvloop's word for a transport that the other side has just closed.
    lost = (OSError, RuntimeError, nats.errors.Error)
    with anyio.CancelScope(shield=True), anyio.move_on_after(deadline_s), suppress(*lost):
        if client.is_connected:
            await client.written()
        await client.close()


def _without_secret(url: str) -> str:
    scheme, _, rest = url.rpartition("://")
    return f"{scheme or 'nats'}://{rest.rpartition('@')[2]}"


class _Auth(TypedDict, total=False):
    user: str
    password: str
    token: str
    user_credentials: str
    nkeys_seed: str
    tls: ssl.SSLContext
    tls_hostname: str


def _auth_options(settings: ConnectSettings) -> _Auth:
    options = _Auth()
    if settings.user:
        options["user"] = settings.user
        options["password"] = read_secret(settings.password_file) if settings.password_file else ""
    if settings.token_file:
        options["token"] = read_secret(settings.token_file)
    if settings.creds_file:
        options["user_credentials"] = _existing(settings.creds_file)
    if settings.nkey_seed_file:
        options["nkeys_seed"] = _existing(settings.nkey_seed_file)
    context = tls_context(settings)
    if context is not None:
        options["tls"] = context
    if settings.tls_hostname:
        options["tls_hostname"] = settings.tls_hostname
    return options


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise NotConnectedError(f"expected a credentials file at {path}, found none")
    return path
