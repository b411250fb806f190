"""What happened during a rollout: launches, model calls, ends."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from schemas.arrays import Array, Bits, Runs
from schemas.payload import PayloadRef


class EpisodeLaunched(msgspec.Struct, frozen=True, kw_only=True):
    """A try of an episode is about to be launched: on the log before the launch itself (`task_id` None), since no
    Arena call makes a launch idempotent.
    """

    group: str
    slot: int
    attempt: int
    launch_try: int
    """0, 1, … within the attempt; each has a session of its own."""
    session: str
    route: str = ""
    model_name: str = ""
    harness: str = ""
    """"key@version" of what runs it: the stream's own, else the live stream's default at that moment; of an agent without an Arena its import
    path or id. Empty where it is not known."""
    reward_key: str = ""
    """"key@version" of the live stream's reward at that moment; empty where it is not known."""


class EpisodeAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """The Arena accepted a launch: whoever takes the episode over polls this task."""

    group: str
    slot: int
    attempt: int
    launch_try: int
    task_id: str


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


class InteractionTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of an interaction: only what is new against its parent.

    The whole context of the call is the chain of parents' `prompt_ids + completion_ids`, then these.
    """

    prompt_ids: Array
    """[P] int32: prompt tokens after the parent's last completion token."""
    completion_ids: Array
    """[C] int32: sampled tokens, as sampled."""
    logprobs: Array
    """[C] float32: behaviour log-probs of the completion at the sampling settings."""
    versions: Runs
    """[C] weight version that sampled each token."""
    messages_json: bytes = b""
    """The call's new messages and its answer, in internal form, for people to read."""


class InteractionRecorded(msgspec.Struct, frozen=True, kw_only=True):
    """One model call of a session."""

    session: str
    ordinal: int
    """0, 1, … in the order of recording; key with the session."""
    interaction_id: str
    """The id that the agent saw in the answer; turn rewards name it."""
    parent: int | None
    """Ordinal of the interaction that this one extends by its exact tokens; None starts a chain."""
    tokens: PayloadRef
    """InteractionTokens."""
    num_context: int
    """Tokens of the chain before `prompt_ids`."""
    num_prompt: int
    """Length of `prompt_ids`."""
    num_completion: int
    min_version: int
    max_version: int
    finish_reason: FinishReason
    trainable: bool = True
    untrainable_reason: str = ""
    """`greedy`, `settings`, `logprobs` …: kept in the context, masked in the loss."""
    temperature: float = 1.0
    protocol: str = ""
    """chat_completions | completions | responses | messages."""
    requested_settings_json: bytes = b""
    """What the harness asked for, before the run's settings overrode it."""
    digest: str = ""
    """Digest of the normalised input messages: finds retries of one call."""


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway took a session up."""

    session: str
    gateway: str
    token_digest: str
    """xxh3 of the session token, never the token."""
    min_version: int = 0


class SessionClosed(msgspec.Struct, frozen=True, kw_only=True):
    """No call of the session will be recorded any more."""

    session: str
    num_interactions: int
    """How many InteractionRecorded this session has: reward mapping waits until it has read them all. With a `system_error` the log may hold
    one more, of a call that was answered with an error since nobody confirmed in time that it is stored."""
    context_overflow: bool = False
    """The gateway answered at least one call with its typed context overflow."""
    system_error: str = ""
    """The gateway itself saw a system error: overrides what the Arena says."""
    late_drops: int = 0
    """Calls that ended after the session and were not recorded."""
    lossy: bool = False
    """The gateway recorded in `fast` mode: answered calls may be missing if it died."""


class SessionClaimed(msgspec.Struct, frozen=True, kw_only=True):
    """A user's own service asks for a session over HTTP. Which slot it gets follows from the log up to this message alone
    (see `stages.online.slots`); a claim that found no free slot is void.
    """

    claim: str
    """The service's own id of the request, or one that the gateway made."""
    ordinal: int
    """0, then 1, 2 … after void claims of the same id."""
    stream: str
    task: str = ""
    """What the service calls its task: sessions with the same one share a group."""
    gateway: str


class SessionRewarded(msgspec.Struct, frozen=True, kw_only=True):
    """A user's own service says what its session is worth; later rewards go before former ones."""

    session: str
    ordinal: int
    """0, 1, … of the session."""
    score: float | None = None
    """Of the whole session."""
    turn_rewards: dict[str, float] = {}
    """interaction id → reward."""
    final: bool = True
    """No further reward follows: once its session has ended, the episode ends with what it has."""
    discard: bool = False
    """The session is not to be trained on: its slot waits for another one."""


LOCAL_UNCLAIMED: Final = "LOCAL_UNCLAIMED"
"""Status of a slot that no online session claimed in time."""


class EpisodeClass(StrEnum):
    """Whose doing an episode's end was."""

    SCORED = "scored"
    MODEL = "model"
    SYSTEM = "system"
    UNKNOWN = "unknown"


class EpisodeEnded(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a slot ended, whatever way."""

    group: str
    slot: int
    attempt: int
    stream: str
    data_id: str
    tags: list[str] = []
    session: str
    """The session whose interactions count; empty when none was opened."""
    outcome: EpisodeClass
    final: bool
    """The last attempt of its slot: a non-final one is followed by another attempt."""
    status: str
    """The Arena's status, or one of ours."""
    error: str = ""
    score: float | None = None
    """The raw score of the whole episode."""
    turn_rewards: dict[str, float] = {}
    """interaction id → reward, where the agent gave a map instead of one number."""
    task_id: str = ""
    harness: str = ""
    """As its launch says it; empty where nothing was launched."""
    reward_key: str = ""
    """As its launch says it, "key@version": the reward that its stream had when it was launched."""
    evaluation: bool = False
    trace_id: str = ""
    artifacts_uri: str = ""
    raw_size_bytes: int = 0
    raw_json: bytes = b""
    """The grader's own object, empty above the configured size."""
    computed_at: str = ""
    seconds: float = 0.0
    """From request to end."""


class RowTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of one training row: a whole token sequence."""

    token_ids: Array
    """[T] int32."""
    loss_mask: Bits
    """[T]: 1 where the token was sampled, is trainable and is owned by this row."""
    logprobs: Array
    """[T] float32: behaviour log-probs, 0 where nothing was sampled."""
    versions: Runs
    """[T] weight version, -1 where nothing was sampled."""
    turns: Runs
    """[T] index of the interaction (ordinal) that a token belongs to."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What assembly knows of a training row: ids, counts, rewards; never tokens."""

    row: str
    tokens: PayloadRef
    """RowTokens."""
    num_tokens: int
    num_loss_tokens: int
    min_version: int
    max_version: int
    reward: float
    turn_rewards: list[float] = []
    """Reward of each interaction on the row's chain, in order; empty when the row has one number only."""
    truncated: bool = False
    """The last completion ran out of its budget."""
    temperature: float = 1.0


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """What one slot gave: its rows with rewards, or why it is rejected. Created once a slot."""

    group: str
    slot: int
    attempt: int
    session: str
    stream: str
    data_id: str
    outcome: EpisodeClass
    rejected: bool
    reason: str = ""
    """Why it is rejected."""
    rows: list[Row] = []
    score: float | None = None
    """The raw score, before transforms."""
    reward: float | None = None
    """The slot's training reward; None when rejected."""
    rewards_per_completion: bool = False
    """Rewards were mapped to single completions, so rows of the slot may have different ones; otherwise that is an error."""
    solved: bool = False
    evaluation: bool = False
    num_interactions: int = 0
    num_completion_tokens: int = 0
