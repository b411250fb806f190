"""The JSON of the server that is read here: only the fields that are used, all others are ignored."""

from __future__ import annotations

import msgspec


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A stream's settings as the server holds them."""

    name: str
    subjects: list[str] = []
    max_bytes: int = -1
    max_msgs_per_subject: int = -1
    max_msgs: int = -1
    max_age: int = 0
    discard: str = "old"
    discard_new_per_subject: bool = False
    storage: str = "file"
    num_replicas: int = 1
    duplicate_window: int = 0
    allow_direct: bool = False
    deny_delete: bool = False
    deny_purge: bool = False
    retention: str = "limits"
    compression: str = "none"


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """How much a stream holds."""

    messages: int = 0
    bytes: int = 0
    first_seq: int = 0
    last_seq: int = 0
    num_subjects: int = 0
    subjects: dict[str, int] | None = None


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and state of a stream."""

    config: StreamConfig
    state: StreamState
    created: str = ""


class ConsumerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's settings as the server holds them. Times are nanoseconds."""

    durable_name: str = ""
    ack_policy: str = "none"
    ack_wait: int = 0
    max_ack_pending: int = 0
    max_deliver: int = -1
    filter_subject: str = ""
    filter_subjects: list[str] = []
    num_replicas: int = 0

    @property
    def filters(self) -> list[str]:
        """Its filters, however many there are."""
        return list(self.filter_subjects) or ([self.filter_subject] if self.filter_subject else [])


class SequencePair(msgspec.Struct, frozen=True, kw_only=True):
    """A position: of the consumer and of the stream."""

    consumer_seq: int = 0
    stream_seq: int = 0


class ConsumerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and state of a consumer."""

    name: str
    config: ConsumerConfig
    delivered: SequencePair = SequencePair()
    ack_floor: SequencePair = SequencePair()
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0
    num_pending: int = 0


class ConsumerPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list of consumers."""

    total: int = 0
    consumers: list[ConsumerInfo] | None = None


class StreamNames(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list of streams."""

    total: int = 0
    streams: list[str] | None = None


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a purge."""

    purged: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion."""

    success: bool = False
