"""One door to all brokers: the URL's scheme says which.

`nats://host:port`, `tls://host:port` or `amqp://host:port`, `amqps://host:port` (several, separated by commas), `memory://`.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType

from broker.api import Broker, Mirror
from broker.errors import BrokerError
from broker.jetstream import Admin, open_broker, open_link
from broker.memory import MemoryBroker, MemoryServer
from broker.settings import ConnectSettings
from broker.topology import RunLimits


@asynccontextmanager
async def connect(
    url: str,
    run: str,
    settings: ConnectSettings | None = None,
    *,
    create: bool = False,
    limits: RunLimits | None = None,
    memory: MemoryServer | None = None,
) -> AsyncGenerator[Broker]:
    """A run's broker.

    Args:
        url: Where the broker is.
        run: Whose log.
        settings: Credentials and patience.
        create: Make the run's streams if they are missing.
        limits: For streams that are made.
        memory: The server behind `memory://`; without one, a new and empty one.

    Raises:
        NotConnectedError, NoSuchStreamError, TopologyError, BrokerError (a scheme that is not known).
    """
    urls, scheme = split_url(url)
    if scheme == "memory":
        yield MemoryBroker(MemoryServer() if memory is None else memory, run)
        return
    if scheme == "amqp":
        async with _rabbitmq().open_broker(
            urls, run, settings or ConnectSettings(), create=create, limits=limits
        ) as broker:
            yield broker
        return
    async with open_broker(urls, run, settings or ConnectSettings(), create=create, limits=limits) as broker:
        yield broker


def open_mirror(url: str, settings: ConnectSettings, exchange: str) -> AbstractAsyncContextManager[Mirror]:
    """Where messages can be copied to, for teams that only consume.

    Raises:
        NotConnectedError, NotAllowedError, BrokerError (a broker that is not RabbitMQ).
    """
    urls, scheme = split_url(url)
    if scheme != "amqp":
        raise BrokerError(f"expected amqp://… or amqps://… to copy to, found {scheme}://…")
    return _rabbitmq().open_mirror(urls, settings, exchange)


def _rabbitmq() -> ModuleType:
    """The package that only runs on RabbitMQ need.

    Raises:
        BrokerError: aio-pika is not installed.
    """
    try:
        return importlib.import_module("broker.rabbitmq")
    except ModuleNotFoundError as error:
        if error.name not in ("aio_pika", "aiormq", "pamqp"):
            raise
        raise BrokerError("RabbitMQ needs the extra `rabbitmq`: pip install 'headrace[rabbitmq]'") from error


@asynccontextmanager
async def open_admin(url: str, settings: ConnectSettings | None = None) -> AsyncGenerator[Admin]:
    """Topologies on a NATS server: apply, verify, diff, list and delete runs.

    Raises:
        NotConnectedError, BrokerError (a scheme without a topology).
    """
    urls, scheme = split_url(url)
    if scheme != "nats":
        raise BrokerError(f"{scheme}:// has no topology to apply: expected a nats:// or tls:// URL")
    async with open_link(urls, settings or ConnectSettings(), role="admin") as link:
        yield Admin(link)


def split_url(url: str) -> tuple[list[str], str]:
    """The URLs in a comma-separated list, and their common scheme.

    Raises:
        BrokerError: no scheme that is known, or a mixture.
    """
    urls = [part.strip() for part in url.split(",") if part.strip()]
    schemes = {part.partition("://")[0] if "://" in part else "" for part in urls}
    for scheme, kinds in (("memory", {"memory"}), ("nats", {"nats", "tls"}), ("amqp", {"amqp", "amqps"})):
        if schemes and schemes <= kinds:
            return urls, scheme
    found = ", ".join(sorted(f"{scheme}://" if scheme else "no scheme" for scheme in schemes)) or "nothing"
    raise BrokerError(
        f"broker URL: expected nats://host:port, tls://…, amqp://…, amqps://… or memory://, found {found}"
    )
