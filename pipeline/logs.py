"""Logs: one JSON object a line on stderr, or readable lines on a terminal. Secrets never reach them."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

_SECRET_KEY: Final = re.compile(
    r"(token|password|passwd|passphrase|secret|api_?key|access_?key|private_?key|authorization|credentials?|creds|seed_file"
    r"|(?:^|[_\W])(?:pass|pwd|pat|auth|cookie|bearer))$",
    re.IGNORECASE,
)
_SECRET_TEXT: Final = re.compile(
    r"(?i)((?:bearer|authorization[\"']?\s*[=:]\s*[\"']?(?:basic|token|digest))\s+"
    r"|(?:token|api_?key|access_?key|passw(?:or)?d|passphrase|secret)[\"']?\s*[=:]\s*[\"']?)([^\s\"',}]{4,})"
)
_KNOWN_FORM: Final = re.compile(
    r"\b(?:sk-[\w-]{16,}|gh[opsur]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|xox[abpr]-[\w-]{10,}"
    r"|AKIA[A-Z0-9]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)
"""What the keys of well-known services look like, wherever they stand."""
_URL_USER: Final = re.compile(r"(\w+://)[^/\s]+@")
MASK: Final = "***"


def mask_text(text: str) -> str:
    """The text with what looks like a credential replaced."""
    return _KNOWN_FORM.sub(MASK, _URL_USER.sub(rf"\1{MASK}@", _SECRET_TEXT.sub(rf"\1{MASK}", text)))


def is_secret_name(key: str) -> bool:
    """Whether what goes by this name is never shown."""
    return _SECRET_KEY.search(key) is not None


def _mask(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    # Any: structlog's own signature
    for key, value in event.items():
        if is_secret_name(key):
            event[key] = MASK
        elif isinstance(value, str):
            event[key] = mask_text(value)
    return event


def set_up_logs(*, process: str, level: str = "INFO", json_lines: bool | None = None) -> None:
    """Set logging up for this process: everything, standard library loggers included, goes to stderr.

    Args:
        process: named on every line.
        level: DEBUG, INFO, WARNING or ERROR.
        json_lines: None = JSON unless stderr is a terminal.
    """
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    shared: list[Any] = [  # Any: structlog's processors are untyped callables
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _mask,
    ]
    renderer = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "nats", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)
