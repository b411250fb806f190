"""From packed rows to the log-probs of their trained tokens, without the whole logits ever existing.

Shapes: see the room's docstring.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor, nn

from stages.learning.attention import PackLayout
from stages.learning.logprobs import logprobs_from_hidden


class _Output(Protocol):
    last_hidden_state: Tensor


class _Decoder(Protocol):
    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, use_cache: bool, packed: PackLayout) -> _Output: ...


class CausalLM(Protocol):
    """What is needed of a causal language model of transformers."""

    def get_decoder(self) -> _Decoder: ...
    def get_output_embeddings(self) -> nn.Linear: ...


class PolicyForward(nn.Module):
    """A causal language model of transformers as a function from a pack to log-probs.

    One module, so that sharding wrappers hold the output matrix together for as long as its chunks are computed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens_T: Tensor, layout: PackLayout, target_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of the tokens at pack positions `target_N`, each given its row before it.

        Positions must not be the first of a row. float32, at the temperature, over the whole vocabulary.
        """
        model = cast("CausalLM", self.model)  # transformers' auto classes have no type that says so
        output = model.get_decoder()(
            input_ids=tokens_T[None],
            position_ids=layout.position_ids_1T,
            use_cache=False,  # with a cache transformers builds masks from position ids and rows see each other
            packed=layout,
        )
        hidden_ND = output.last_hidden_state[0][target_N - 1]
        return logprobs_from_hidden(hidden_ND, model.get_output_embeddings().weight, tokens_T[target_N], temperature)
