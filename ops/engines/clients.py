"""Clients of a run's servers, by its config."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from ops.config import RunConfig
from ops.engines.plan import MODEL_NAME, can_sleep
from ops.policy_folder import policy_folder
from ops.run_folder import RunFolder
from ops.training_checks import publishes_adapter
from schemas.config import EngineKind
from stages.clients.engines import HttpEngineSettings, http_engine
from stages.ports import InferenceEngine


def engine_client(
    config: RunConfig, folder: RunFolder, kind: EngineKind, name: str, url: str
) -> AbstractAsyncContextManager[InferenceEngine]:
    """An open client to one server; any number of processes may have one to the same server."""
    settings = HttpEngineSettings(
        model=MODEL_NAME,
        model_folder=policy_folder(config, folder),
        max_context=config.rollout.max_context_tokens,
        api_key_env=config.engine.api_key_env,
        adapters=publishes_adapter(config.training, config.engine),
        offload_in_sleep=can_sleep(config.engine),
        max_connections=max(64, 2 * config.engine.max_running_requests),
    )
    return http_engine(kind, name, url, settings)
