"""Every message as JSON Schema, with its subject form: for clients in other languages, and inside recordings.

On the wire a message is msgpack with these field names; `contentEncoding: base64` stands for msgpack `bin`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.subjects import PREFIX
from schemas.topics import TOPICS

SCHEMA_VERSION: Final = 1
"""Raised when a message changes in a way that its former reader could not read."""


class TopicSchema(msgspec.Struct, frozen=True, kw_only=True):
    """How one topic's messages are built."""

    message: str
    subject: str
    """With the run and the key's parts in braces."""
    key: str
    """The key's parts, separated by dots."""
    json_schema: bytes
    """JSON Schema 2020-12, as JSON."""


def subject_form(topic_name: str, key_fields: str) -> str:
    """The form of a topic's subjects: hr.{run}.group.issued.{group}."""
    return ".".join([PREFIX, "{run}", topic_name, *(f"{{{part}}}" for part in key_fields.split("."))])


def json_schema_of(message: type[msgspec.Struct]) -> dict[str, Any]:  # Any: a JSON document
    """JSON Schema of one message type, self-contained."""
    (schema,), components = msgspec.json.schema_components([message], ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": components}


def topic_schemas() -> dict[str, TopicSchema]:
    """The schemas of all topics, by topic."""
    return {
        topic.name: TopicSchema(
            message=topic.message.__name__,
            subject=subject_form(topic.name, topic.key_fields),
            key=topic.key_fields,
            json_schema=msgspec.json.encode(json_schema_of(topic.message), order="deterministic"),
        )
        for topic in TOPICS
    }
