"""What vLLM's workers on CPUs lack to take new weights whole: `--worker-extension-cls headrace_vllm.WholeReload`.

vLLM packs each matrix for the CPU when it is loaded. A head that is tied to the embeddings has no weights of its own to load, so
`reload_weights` leaves it as it was packed from the first embeddings, and says no more than "Failed to load weights".
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]  # the server's
    ParallelLMHead,
)


class WholeReload:
    """Methods for `collective_rpc`; mixed into the worker's class by vLLM."""

    def reload_weights_and_heads(self: Any, weights_path: str) -> None:  # Any: vLLM's worker, which this is mixed into
        """Load a folder's weights as `reload_weights` does, and pack heads that share the embeddings' again."""
        self.reload_weights(weights_path=weights_path)
        model = self.get_model()
        shared = {
            tensor.data_ptr()
            for module in model.modules()
            if not isinstance(module, ParallelLMHead)
            for tensor in module.parameters(recurse=False)
        }
        for module in model.modules():
            if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in shared:
                module.quant_method.process_weights_after_loading(module)
