"""JetStream behind the `Broker` port. The only package that imports nats."""

from broker.importing import import_without

# Only nats-py's WebSocket transport uses aiohttp; connections here are TCP or TLS, and an HTTP client weighs 8 MB in every worker.
import_without("aiohttp", library="nats")

from broker.jetstream.admin import Admin  # noqa: E402 - after nats
from broker.jetstream.broker import JetStreamBroker, open_broker  # noqa: E402 - same
from broker.jetstream.link import ConnectionState, Link  # noqa: E402 - same
from broker.jetstream.opening import open_link  # noqa: E402 - same

__all__ = ["Admin", "ConnectionState", "JetStreamBroker", "Link", "open_broker", "open_link"]
