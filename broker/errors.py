"""The error tree of how bytes move.

BrokerError
├── RetryableBrokerError           try again: the broker is away or slow
│   ├── NotConnectedError
│   ├── TooFewServersError         a stream wants more copies than servers are there now
│   └── PublishTimeoutError        may have been stored: publish the same again
├── StoreFullError                 the log refuses new messages until something is purged
├── TooLargeError                  over max_payload: nothing was sent
├── ConflictError                  a last-value key was moved by somebody else
├── NoSuchStreamError
├── NotAllowedError                the credentials lack a right
├── RequestFailedError             whoever served the request answered with an error
├── TopologyError                  what stands on the server differs from what is declared
├── PayloadMissingError
└── ServerStartError               the embedded server can't start
    └── StoreLockedError
"""

from __future__ import annotations


class BrokerError(Exception):
    """Root of the errors of this room."""


class RetryableBrokerError(BrokerError):
    """The same call may succeed later."""


class NotConnectedError(RetryableBrokerError):
    """No connection to the broker within the deadline."""


class TooFewServersError(RetryableBrokerError):
    """A stream can't be made: it wants more copies than servers are there now."""


class PublishTimeoutError(RetryableBrokerError):
    """No confirmation within the deadline; the message may or may not be stored. Publishing it again is safe."""


class StoreFullError(BrokerError):
    """The stream is at its limit and refuses new messages; nothing is lost, nothing is stored."""


class TooLargeError(BrokerError):
    """Message and headers exceed max_payload; nothing was sent."""


class ConflictError(BrokerError):
    """A last-value key has another revision than the caller knew."""


class NoSuchStreamError(BrokerError):
    """The run's streams don't exist on this broker."""


class NotAllowedError(BrokerError):
    """These credentials may not do that; the text names the subject."""


class RequestFailedError(BrokerError):
    """The server of a request could not answer it; the text is its reason."""


class TopologyError(BrokerError):
    """A stream or a consumer on the server has other settings than declared."""


class PayloadMissingError(BrokerError):
    """The payload store holds no such payload."""


class ServerStartError(BrokerError):
    """The embedded server did not start."""


class StoreLockedError(ServerStartError):
    """Another server uses this store folder."""
