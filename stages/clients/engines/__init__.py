"""Inference servers over HTTP behind the port `InferenceEngine`: vLLM and SGLang.

    http_engine ─▶ HttpEngine: admission, streams, version labels, swaps ─▶ Dialect: what one kind of server wants to hear
                                                                              vllm.py │ sglang.py
                                                       http.py: one pooled session, typed errors, event streams

Start with `engine.py`. Imports neither vLLM nor SGLang; docs/engines.md says which versions were tested.
"""

from stages.clients.engines.engine import HttpEngine, http_engine
from stages.clients.engines.settings import HttpEngineSettings

__all__ = ["HttpEngine", "HttpEngineSettings", "http_engine"]
