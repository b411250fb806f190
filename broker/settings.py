"""How to reach a broker, and how patient to be with it. Nothing here is a secret: secrets are named by file.

It must not know how a connection is made.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from broker.errors import NotConnectedError


class ConnectSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who we are and how long we wait. One of token_file, creds_file, nkey_seed_file, user may be given."""

    name: str = "headrace"
    """Shown by the server's monitoring."""
    user: str = ""
    password_file: str = ""
    token_file: str = ""
    creds_file: str = ""
    """A NATS .creds file (JWT and seed)."""
    nkey_seed_file: str = ""
    tls_ca_file: str = ""
    """Check the server's certificate against these instead of the system's."""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_hostname: str = ""
    """Name expected in the server's certificate, when it differs from the URL's."""
    inbox_prefix: str = "_INBOX"
    """Where answers come to. Credentials that may not overhear others' answers have a prefix of their own."""
    connect_deadline_s: float = 10.0
    """For the first connection; afterwards reconnecting never ends."""
    reconnect_wait_s: float = 0.25
    ping_interval_s: float = 5.0
    """A server that misses two of these is given up and connected anew."""
    request_timeout_s: float = 2.0
    """One question to the server; unanswered it is asked again, and an answer to any of its askings counts. In a cluster it is
    asked again as soon as a leader is elected.
    """
    publish_deadline_s: float = 30.0
    """A publish gives up after this long without a confirmation."""
    max_in_flight: int = 4096
    """Publishes on one connection that wait for their confirmation."""
    max_in_flight_bytes: int = 32 * 1024 * 1024
    payload_dir: str = ""
    """Keep payloads as files in this folder (one that all workers share) instead of on the broker."""
    payload_fsync: bool = False
    """Force each payload file to disk."""
    payload_chunk_bytes: int = 1024 * 1024
    """Larger payloads are cut; never above the server's max_payload."""
    payload_renew_after_s: float = 300.0
    """Storing bytes that stand there already renews their age when they are older than this, so that nobody collects them
    before a message names them again. Less than half of the least age of what is collected.
    """
    pull_expires_s: float = 30.0
    idle_heartbeat_s: float = 1.0
    """A parked pull that misses two of these is asked again."""
    listen_buffer: int = 1024
    """Announcements that a slow listener may be behind before it loses the oldest."""
    serve_concurrency: int = 16
    """Requests of one subject that are answered at the same time."""


def read_secret(path: str) -> str:
    """The one-line secret in a file.

    Raises:
        NotConnectedError: the file can't be read or is empty.
    """
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise NotConnectedError(f"expected a secret in the file {path}, found: {error.strerror}") from error
    if not secret:
        raise NotConnectedError(f"expected a secret in the file {path}, found an empty file")
    return secret
