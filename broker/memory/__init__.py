"""The reference implementation of the ports, in one process: what the others are measured against, and what tests use.

A `MemoryServer` outlives its brokers, as a real server does. It must not know any wire format.
"""

from broker.memory.broker import MemoryBroker
from broker.memory.payloads import MemoryPayloads
from broker.memory.server import MemoryServer

__all__ = ["MemoryBroker", "MemoryPayloads", "MemoryServer"]
