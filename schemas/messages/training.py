"""Steps and weights."""

from __future__ import annotations

import msgspec

from schemas.arrays import Array
from schemas.payload import PayloadRef


class DroppedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that closed since the step before and is not trained, with the reason."""

    group: str
    stream: str
    reason: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One step, columnar: R rows in the order of training. The payload of StepAssembled."""

    format: int = 1
    run: str
    step: int
    algorithm: str
    """The advantage estimator."""
    aggregation: str
    """The loss aggregation that `loss_weight` stands for."""
    temperature: float
    groups: list[str]
    """The step's groups, [G]."""
    streams: list[str]
    """Stream names that `row_stream` indexes."""
    row_ids: list[str]
    """[R]"""
    row_group: Array
    """[R] int32: index into `groups`."""
    row_slot: Array
    """[R] int32."""
    row_stream: Array
    """[R] int32: index into `streams`."""
    reward: Array
    """[R] float64: the row's training reward."""
    advantage: Array
    """[R] float64; for token-level estimators (gae) the reward that the trainer turns into advantages."""
    loss_weight: Array
    """[R] float64: w_i of Σ_i w_i Σ_t m_it·ℓ_it, over the row's mini-batch."""
    mini_batch: Array
    """[R] int32: the optimizer step within the step, from 0."""
    num_tokens: Array
    """[R] int32."""
    num_loss_tokens: Array
    """[R] int32."""
    min_version: Array
    """[R] int32."""
    max_version: Array
    """[R] int32."""
    payload_ids: list[str]
    """[R] content address of RowTokens."""
    payload_sizes: Array
    """[R] int64, bytes."""
    payload_store: str
    turn_advantages: list[list[float]] = []
    """[R] one advantage per turn where the algorithm gives turns their own; else empty."""
    dropped: list[DroppedGroup] = []
    stats: dict[str, float] = {}
    stream_stats: dict[str, dict[str, float]] = {}


class StepAssembled(msgspec.Struct, frozen=True, kw_only=True):
    """A step's batch is decided: one manifest names everything."""

    step: int
    """From 1: step s makes version s out of version s-1."""
    manifest: PayloadRef
    groups: list[str]
    """The groups that it trains; groups dropped on the way are in the manifest and in `dropped`."""
    dropped: list[DroppedGroup] = []
    num_rows: int
    num_tokens: int
    num_mini_batches: int
    min_version: int
    """Oldest version among its rows: its staleness is (step - 1) - min_version."""
    mean_reward: float


class StepTrained(msgspec.Struct, frozen=True, kw_only=True):
    """A step's update was made by one incarnation of the trainer."""

    step: int
    generation: int
    digest: str
    """xxh3 over the new weights."""
    manifest_id: str
    stats: dict[str, float] = {}
    """Global statistics (loss, entropy, kl, clip_fraction, ratio, grad_norm …)."""
    skipped: str = ""
    """Why no update was made, e.g. `non-finite gradient`."""
    seconds: float = 0.0
    num_tokens: int = 0
    world_size: int = 1
    checkpoint_step: int = 0
    """The latest step whose checkpoint is complete."""
    oldest_checkpoint_step: int = 0
    """The oldest step whose checkpoint is kept."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a set of weights."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    """Byte offset within the data section of its file."""
    size_bytes: int
    xxh3: str
    """64-bit xxh3 of the tensor's bytes, 16 hex digits."""


class WeightFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a version's folder, besides the one that holds the tensors (config, tokenizer …)."""

    name: str
    size_bytes: int
    xxh3: str
    """64-bit xxh3 of its bytes, 16 hex digits."""


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of a version: what a receiver checks before it touches an engine."""

    tensors: list[Tensor]
    total_bytes: int
    """Size of the file that holds them."""
    file: str = "model.safetensors"
    """Its name: `adapter_model.safetensors` where only an adapter is published."""
    files: list[WeightFile] = []
    """The folder's other files."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a file in the payload store."""

    offset: int
    size_bytes: int
    id: str
    """Content address: equal pieces of two versions are stored and fetched once."""


class PartedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a version's folder as pieces, in order and without gaps."""

    name: str
    size_bytes: int
    parts: list[Part]


class WeightParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the payload store holds a version's folder, piece by piece. Pieces begin where tensors begin."""

    files: list[PartedFile]


class WeightsPublished(msgspec.Struct, frozen=True, kw_only=True):
    """New weights can be loaded. Version v = the weights after step v; 0 = the initial ones."""

    version: int
    generation: int
    digest: str
    """xxh3 over all tensors' bytes in order of name: equal digests, equal weights."""
    manifest: PayloadRef
    """WeightsManifest."""
    file: PayloadRef | None = None
    """The safetensors file as one payload. Read, but not written any more: see `parts`."""
    directory: str = ""
    """A folder that an engine on this node or a shared file system can load; empty if none."""
    parts: PayloadRef | None = None
    """WeightParts: the folder's files in the payload store; None when only the directory holds them."""
    adapter: bool = False
    """The folder holds a LoRA adapter (peft's files and keys) on top of version 0 instead of whole weights."""


class WeightsLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """An engine answers with this version from now on."""

    engine: str
    incarnation: str
    """Changes whenever the engine's process starts anew."""
    version: int
    generation: int
    seconds: float = 0.0


class FoldCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Last-value: where a fold would start again. The only message that holds a broker sequence."""

    fold: str
    sequence: int
    """Everything up to here is in the state."""
    state: PayloadRef
    state_version: int = 1


class TrainerLease(msgspec.Struct, frozen=True, kw_only=True):
    """Last-value: the one incarnation of the trainer that may publish."""

    generation: int
    holder: str
    renewed_unix_s: float
    ttl_s: float
