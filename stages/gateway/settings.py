"""Settings of a gateway: the run's sampling, limits, deadlines. Decoded from the run's config by ops."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Recording(StrEnum):
    """When an interaction is stored."""

    STRICT = "strict"
    """Before its answer ends: no answered call is ever missing from the log."""
    FAST = "fast"
    """Soon after: a killed gateway loses at most `fast_backlog` answered calls; its sessions are labelled lossy."""


class OverridePolicy(StrEnum):
    """What happens to sampling settings that a harness asks for."""

    OVERRIDE = "override"
    """The run's settings rule; what was asked is recorded."""
    HONOUR = "honour"
    """What was asked rules; calls that differ from the run's distribution are kept out of training."""


class ToolFormat(StrEnum):
    """How the policy writes tool calls."""

    HERMES = "hermes"
    """JSON inside <tool_call> (Hermes, Qwen)."""
    QWEN3_CODER = "qwen3_coder"
    """XML inside <tool_call> (Qwen3-Coder)."""
    NONE = "none"
    """Answers are never parsed for calls."""


class ToolSchemas(StrEnum):
    """How tool schemas reach the chat template: as the engine's own chat server would pass them."""

    VLLM = "vllm"
    """{"type", "function": {"name", "description", "parameters"}}, absent fields as null."""
    SGLANG = "sglang"
    """The bare function: description, name, parameters, strict."""
    OPENAI = "openai"
    """{"type", "function"} with only the fields that are there."""


class RunSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The run's settings of trained calls."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    max_new_tokens: int = 4096
    """Upper bound of one answer, whatever is asked."""
    policy: OverridePolicy = OverridePolicy.OVERRIDE


class GatewayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that keep a hostile or broken client from hurting others."""

    max_body_bytes: int = 16 * 1024 * 1024
    """A million tokens of conversation are about 5 MB."""
    max_header_bytes: int = 64 * 1024
    max_messages: int = 8192
    max_json_depth: int = 64
    max_choices: int = 16
    max_connections: int = 2048
    max_running_calls: int = 512
    """Calls that may sample at once."""
    max_waiting_calls: int = 2048
    """Calls that may wait for their turn; further ones are answered 429 with retry-after."""
    max_sessions: int = 10_000
    header_deadline_s: float = 20.0
    """From the connection's start, or a request's first byte, to the end of its headers."""
    body_deadline_s: float = 60.0
    call_deadline_s: float = 1800.0
    """The longest a call may take."""
    record_deadline_s: float = 60.0
    """The longest the store may take for one interaction."""
    peer_deadline_s: float = 10.0
    """The longest a lookup about a foreign session may take."""
    max_resumes: int = 16
    """How often one answer goes on after a lost engine, or an abort before a token came."""
    resume_delay_s: float = 0.2
    """Before asking again for an engine that was away; doubled each time, at most 5 s."""
    keepalive_s: float = 5.0
    """Silence in a stream after which a ping is sent."""
    idle_expiry_s: float = 7200.0
    """A session without a call for this long is closed."""
    max_ended_sessions: int = 10_000
    """How many ended sessions are remembered in order to refuse late calls by name."""
    fast_backlog: int = 256
    """`fast`: interactions that may wait to be stored; above it answers wait."""


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one gateway works."""

    name: str
    """Unique in the run."""
    model: str = "policy"
    """The name under which the policy is listed; any model name is accepted."""
    context_length: int
    """The engine's context, tokens."""
    sampling: RunSampling = RunSampling()
    recording: Recording = Recording.STRICT
    tool_format: ToolFormat = ToolFormat.HERMES
    tool_schemas: ToolSchemas = ToolSchemas.VLLM
    reasoning: bool = True
    """Whether <think> … </think> is split from the text."""
    limits: GatewayLimits = GatewayLimits()
    generation_keys: tuple[str, ...] = ()
    """Keys that only generate: with a session token beside them they do nothing more; alone they are a probe, never recorded."""
    control_key: str = ""
    """Opens, rewards and ends online sessions over HTTP; empty: those routes are closed."""
    public_url: str = ""
    """Where agents reach this gateway, without a trailing slash; empty: the address it is bound to."""

    def __repr__(self) -> str:
        return f"GatewaySettings(name={self.name!r}, model={self.model!r}, recording={self.recording.value!r})"
