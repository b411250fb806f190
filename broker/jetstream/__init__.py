"""JetStream behind the `Broker` port. The only package that imports nats."""

from broker.jetstream.admin import Admin
from broker.jetstream.broker import JetStreamBroker, open_broker
from broker.jetstream.link import ConnectionState, Link
from broker.jetstream.opening import open_link

__all__ = ["Admin", "ConnectionState", "JetStreamBroker", "Link", "open_broker", "open_link"]
