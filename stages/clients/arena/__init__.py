"""The client of an Arena: calls, registrations, routes, failure classes, preflight, audit.

Read `client.py` first. Shares no code with the local Arena, which is its other side in the tests.
"""

from stages.clients.arena.classify import EpisodeFacts, Verdict, classify
from stages.clients.arena.client import ArenaAccess, ArenaClient, Launch, ModelEndpoint, open_arena
from stages.clients.arena.errors import (
    ArenaBusyError,
    ArenaConnectionError,
    ArenaContractError,
    ArenaError,
    ArenaFatalError,
    ArenaLaunchLostError,
    ArenaNotFoundError,
    ArenaRefusedError,
    ArenaRetryableError,
    DatasetPagingError,
    RewardDriftError,
    TaskResultError,
)
from stages.clients.arena.receipts import Receipt, ReceiptVerdict, read_receipt
from stages.clients.arena.secret import Secret, secret_from
from stages.clients.arena.wire import ArenaStream, DatasetRow, TaskResult, VersionedRef, task_type

__all__ = [
    "ArenaAccess",
    "ArenaBusyError",
    "ArenaClient",
    "ArenaConnectionError",
    "ArenaContractError",
    "ArenaError",
    "ArenaFatalError",
    "ArenaLaunchLostError",
    "ArenaNotFoundError",
    "ArenaRefusedError",
    "ArenaRetryableError",
    "ArenaStream",
    "DatasetPagingError",
    "DatasetRow",
    "EpisodeFacts",
    "Launch",
    "ModelEndpoint",
    "Receipt",
    "ReceiptVerdict",
    "RewardDriftError",
    "Secret",
    "TaskResult",
    "TaskResultError",
    "Verdict",
    "VersionedRef",
    "classify",
    "open_arena",
    "read_receipt",
    "secret_from",
    "task_type",
]
