"""How a server is talked to."""

from __future__ import annotations

import msgspec


class HttpEngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server's facts and the patience with it."""

    model: str = "policy"
    """Name under which vLLM serves the policy."""
    model_folder: str = ""
    """HF folder that the server was started with, as seen from here; empty = where the server says it is."""
    vocab_size: int = 0
    """Ids from here on are refused; 0 = what config.json of the model folder says."""
    max_context: int = 0
    """Prompt and completion tokens of one request; 0 = what the server says."""
    initial_version: int = 0
    """Version of the weights that the server was started with."""
    api_key_env: str = ""
    """Environment variable that holds the server's key; empty = it wants none."""
    connect_timeout_s: float = 5.0
    call_timeout_s: float = 30.0
    """Of a control call: abort, pause, health …"""
    silence_timeout_s: float = 900.0
    """The longest that a stream may be silent; a paused server says nothing for as long as it is paused."""
    load_timeout_s: float = 600.0
    """From the first touch of a weight swap to its end, the drain aside."""
    drain_timeout_s: float = 120.0
    """The longest that running requests may take to end before a drain is given up."""
    adapters: bool = False
    """Whether LoRA adapters may come: the server is asked for the newest one before each request."""
    adapter_wait_s: float = 10.0
    """A server holds few adapters at once: the longest that a new one waits for the requests of the oldest one to end; then all
    running ones end with reason abort.
    """
    max_connections: int = 512
    stream_interval: int = 1
    """Tokens in one event of a stream: more cost less, and more are lost with a server that dies."""
    confirm_interval_s: float = 0.02
    """vLLM: the least time between two questions for the version; tokens wait for an answer before they are handed out."""
    offload_in_sleep: bool = False
    """Whether the server was started so that it can give up its memory (vLLM --enable-sleep-mode, SGLang
    --enable-memory-saver); else sleeping is pausing."""
