"""The error tree of what is said.

SchemaError
├── InvalidIdError        an id or a subject that the broker could not carry
├── DecodeError           bytes that are no message of their topic
├── NonFiniteError        NaN or infinity on its way into a message
├── DigestError           bytes that are not what their reference promises
└── ConfigError           a setting that can't be used, with its path
"""

from __future__ import annotations


class SchemaError(Exception):
    """Root of the errors of this room."""


class InvalidIdError(SchemaError, ValueError):
    """An id that is empty, or a subject pattern that could match nothing."""


class DecodeError(SchemaError, ValueError):
    """Bytes that can't be read as the message their topic promises."""


class NonFiniteError(SchemaError, ValueError):
    """A NaN or an infinity was about to be written into a message."""


class DigestError(SchemaError, ValueError):
    """A payload whose size or checksum differs from its reference."""


class ConfigError(SchemaError, ValueError):
    """A setting that can't be used. The text starts with the key's path."""
