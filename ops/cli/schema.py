"""`headrace schema [TOPIC]`."""

from __future__ import annotations

import difflib
import json
import sys

from ops.cli.failing import plain_errors
from ops.logtools.message_docs import markdown as messages_markdown
from ops.logtools.message_docs import schema_document
from schemas.errors import ConfigError
from schemas.topics import TOPICS, topic_named


def schema(topic: str | None = None, /, *, markdown: bool = False) -> int:
    """Every message as JSON Schema, with its subject and headers: for publishing from any NATS client.

    Examples:
        headrace schema
        headrace schema prompt.published
        headrace schema --markdown > docs/messages.md

    Parameters
    ----------
    topic
        Only this one, such as prompt.published; all of them when left out.
    markdown
        The document for people, docs/messages.md, instead.
    """
    if markdown:
        sys.stdout.write(messages_markdown())
        return 0
    with plain_errors():
        topics = TOPICS
        if topic is not None:
            found = topic_named(topic)
            if found is None:
                names = [one.name for one in TOPICS]
                close = difflib.get_close_matches(topic, names, n=2)
                hint = f"did you mean {' or '.join(close)}?" if close else f"topics: {', '.join(names)}"
                raise ConfigError(f"schema {topic!r}: there is no such topic; {hint}")
            topics = (found,)
    sys.stdout.write(json.dumps(schema_document(topics), indent=2, ensure_ascii=False) + "\n")
    return 0
