"""From packs to log-probs or values through this rank's part of the model: all of it, or one stage of a pipeline.

Rows of a pack keep their own positions. Shapes: T tokens of a pack, N trained tokens, D hidden size, E head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from stages.learning.attention import PackLayout
from stages.training.megatron.model import Shape
from stages.training.megatron.vocab_parallel import VocabularyPart, parallel_logprobs


class MegatronForward(nn.Module, ABC):
    """The way up to the last hidden states; what comes of them is the subclass's.

    Megatron's schedules find `config`, `model_type` and `set_input_tensor` here.
    """

    def __init__(self, model: GPTModel, shape: Shape) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.model_type = model.model_type
        self._pad_token_id = shape.pad_token_id
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        self._inverse_frequencies = 1.0 / shape.theta**exponents

    def set_input_tensor(self, hidden_T1D: list[Tensor | None]) -> None:
        """What the stage before sent."""
        cast("Any", self.model).set_input_tensor(hidden_T1D)

    def forward(
        self, tokens_T: Tensor, layout: PackLayout, target_N: Tensor, temperature: float
    ) -> tuple[Tensor, ...] | Tensor:
        """Numbers [N] for the tokens at pack positions `target_N`, each given its row before it; on a stage that isn't the
        last, the hidden states [T, 1, D] for the next.
        """
        model = cast("Any", self.model)  # Megatron's modules are untyped
        hidden_T1D = self._embedded(tokens_T) if model.pre_process else None
        angles_TE = torch.outer(
            layout.position_ids_1T[0].float(), self._inverse_frequencies.to(layout.position_ids_1T.device)
        )
        rotary_T11E = torch.cat([angles_TE, angles_TE], dim=-1)[:, None, None, :]
        hidden_T1D = model.decoder(hidden_states=hidden_T1D, attention_mask=layout, rotary_pos_emb=rotary_T11E)
        if not model.post_process:
            return hidden_T1D
        return self.end(hidden_T1D[:, 0][target_N - 1], tokens_T[target_N], temperature)

    @abstractmethod
    def end(self, hidden_ND: Tensor, token_N: Tensor, temperature: float) -> tuple[Tensor, ...]:
        """Of the states in which the tokens were chosen, which every tensor-parallel rank has: float32 [N] each."""

    def _embedded(self, tokens_T: Tensor) -> Tensor:
        hidden_T1D: Tensor = cast("Any", self.model).embedding(input_ids=tokens_T[None], position_ids=None)
        if self._pad_token_id is None:
            return hidden_T1D
        is_pad_T11 = (tokens_T == self._pad_token_id)[:, None, None]
        return torch.where(is_pad_T11, hidden_T1D.detach(), hidden_T1D)


class LogprobForward(MegatronForward):
    """Log-probs and entropies."""

    def __init__(self, model: GPTModel, shape: Shape) -> None:
        super().__init__(model, shape)
        group = cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())
        size = shape.padded_vocabulary // group.size()
        self._part = VocabularyPart(group, first=group.rank() * size, size=size, vocabulary=shape.vocab_size)

    def end(self, hidden_ND: Tensor, token_N: Tensor, temperature: float) -> tuple[Tensor, ...]:
        model = cast("Any", self.model)
        weight_VD = (
            model.shared_embedding_or_output_weight()
            if model.share_embeddings_and_output_weights
            else model.output_layer.weight
        )
        hidden_ND = copy_to_tensor_model_parallel_region(hidden_ND)
        return parallel_logprobs(hidden_ND, weight_VD, token_N, temperature, self._part)


class ValueForward(MegatronForward):
    """A critic's values: a head of zeros in place of the output matrix, whole on each rank of the last stage."""

    def __init__(self, model: GPTModel, shape: Shape) -> None:
        super().__init__(model, shape)
        untyped = cast("Any", model)
        if untyped.post_process:
            del untyped.output_layer
            weight = next(model.decoder.parameters())
            head = nn.Linear(shape.hidden_size, 1, device=weight.device, dtype=weight.dtype)
            nn.init.zeros_(head.weight)  # values start at 0, not at noise
            nn.init.zeros_(head.bias)
            untyped.value_head = head

    def end(self, hidden_ND: Tensor, token_N: Tensor, temperature: float) -> tuple[Tensor, ...]:
        del token_N, temperature
        head = cast("nn.Linear", cast("Any", self.model).value_head)
        return (head(hidden_ND.to(head.weight.dtype)).squeeze(-1).float(),)
