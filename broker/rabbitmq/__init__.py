"""A run on RabbitMQ: a stream queue is the log, quorum queues share work, a folder holds payloads and last values.

    publish ─▶ stream queue ─▶ every connection folds it: the first message of a subject stands
                    └──▶ dispatcher (one at a time, leased) ─▶ a quorum queue per durable ─▶ workers

It must not know JetStream. What holds here and what does not: docs/rabbitmq.md.
"""

from broker.rabbitmq.broker import RabbitBroker, delete_run, open_broker
from broker.rabbitmq.mirror import open_mirror

__all__ = ["RabbitBroker", "delete_run", "open_broker", "open_mirror"]
