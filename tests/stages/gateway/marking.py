"""A run's own preprocessors, as `gateway.preprocessors` names them."""

import msgspec


def mark(call):
    """Put a mark at the end of the first message."""
    first, *others = call.messages
    marked = msgspec.structs.replace(first, texts=(*first.texts, "[mark]"))
    return msgspec.structs.replace(call, messages=(marked, *others))


def forget(call):
    """Return nothing, by mistake."""


async def later(call):
    """Async, by mistake."""
    return call


def of_two(call, settings):
    """Take too much, by mistake."""
    return call


NUMBER = 3
