"""One open session: its token, its forest, its running calls. No I/O."""

from __future__ import annotations

import base64
import secrets
from collections import OrderedDict
from typing import Final

import anyio
import msgspec

from schemas.messages.rollout import SessionClosed
from schemas.payload import digest
from stages.gateway.conversation import Message
from stages.gateway.errors import InvalidRequestError
from stages.gateway.forest import Forest
from stages.gateway.shortcuts import Shortcuts

_TOKEN_PREFIX: Final = "hrs"
_MAX_RESPONSES: Final = 64


class SessionTicket(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to speak as a session."""

    session: str
    token: str
    """Generates, and nothing else. A secret."""
    base_url: str
    """Without /v1: Anthropic clients take it as it is, OpenAI clients with /v1."""

    def __repr__(self) -> str:
        return f"SessionTicket(session={self.session!r}, base_url={self.base_url!r})"


def new_token(session: str) -> str:
    """A fresh session token. It names its session, so that any gateway knows where to look."""
    name = base64.urlsafe_b64encode(session.encode()).decode().rstrip("=")
    return f"{_TOKEN_PREFIX}.{name}.{secrets.token_urlsafe(24)}"


def session_of(token: str) -> str | None:
    """The session that a token claims to be of, or None when it is no session token."""
    parts = token.split(".")
    if len(parts) != 3 or parts[0] != _TOKEN_PREFIX:
        return None
    try:
        return base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)).decode()
    except ValueError:
        return None


def token_digest(token: str) -> str:
    """What the log may hold of a token."""
    return digest(token.encode("utf-8", "surrogatepass"))


def check_session_id(session: str) -> str:
    """`session` itself, if it can be one.

    Raises:
        InvalidRequestError: it is not 1 to 200 of the allowed characters.
    """
    legal = session[:1].isalnum() and all(one.isalnum() or one in "_.:-" for one in session)
    if not (legal and session.isascii() and len(session) <= 200):
        raise InvalidRequestError(
            f"a session id is 1 to 200 letters, digits, '_', '.', ':' or '-', starting with a letter or digit: found {session[:200]!r}"
        )
    return session


class Session:
    """An open session."""

    def __init__(
        self, session_id: str, token: str, *, min_version: int, now_s: float, forest: Forest | None = None
    ) -> None:
        self.id: Final = session_id
        self.token: Final = token
        self.min_version: Final = min_version
        self.forest = forest if forest is not None else Forest()
        self.recording: Final = anyio.Lock(fast_acquire=True)
        """Held while an interaction gets its ordinal and is stored: ordinals have no gaps."""
        self.running: Final[set[anyio.CancelScope]] = set()
        self.last_used_s = now_s
        self.announced: Final = anyio.Event()
        """Set once its opening is stored, or could not be."""
        self.ended = False
        self.moved = False
        """Another gateway records it now: this copy is worth nothing."""
        self.closed: SessionClosed | None = None
        self.context_overflow = False
        self.system_error = ""
        self.late_drops = 0
        self.num_recorded = 0 if forest is None else len(forest.nodes)
        """`fast`: how many of the forest's nodes are stored."""
        self.shortcuts: Final = Shortcuts()
        self.responses: Final[OrderedDict[str, tuple[Message, ...]]] = OrderedDict()
        """responses: the conversations that previous_response_id may name."""

    def __repr__(self) -> str:
        return f"Session({self.id!r})"

    @property
    def interaction_ids(self) -> set[str]:
        """The ids that agents saw in recorded answers."""
        return {node.interaction_id for node in self.forest.nodes}

    def remember_response(self, response_id: str, messages: tuple[Message, ...]) -> None:
        """Keep a conversation for previous_response_id; the oldest is forgotten."""
        self.responses[response_id] = messages
        if len(self.responses) > _MAX_RESPONSES:
            self.responses.popitem(last=False)

    def fail(self, reason: str) -> None:
        """Note a fault of the system: it overrides whatever the Arena says of the episode. The first one stays."""
        self.system_error = self.system_error or reason[:500]
