"""Networks over an HF decoder: the policy, frozen models that only give log-probs, the critic. And how each is placed.

Shapes: T tokens of a pack, N trained tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from stages.learning.attention import PackLayout
from stages.learning.forward import CausalLM, PolicyForward
from stages.training.batches import MicroBatch
from stages.training.errors import TrainingError
from stages.training.model_folder import read_model
from stages.training.passes import Passes, WholePasses
from stages.training.placement import Placement


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a causal language model, in order.

    Raises:
        TrainingError: It has none where transformers keeps them.
    """
    decoder = cast("CausalLM", model).get_decoder()
    blocks = getattr(decoder, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise TrainingError(f"{type(model).__name__} has no list of blocks at get_decoder().layers: it can't be split")
    return list(blocks)


def recompute_activations(model: nn.Module) -> None:
    """Compute each block's activations again in the backward pass instead of keeping them."""
    enable = cast("Callable[..., None]", getattr(model, "gradient_checkpointing_enable"))  # noqa: B009 - transformers' untyped method
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


class ValueForward(nn.Module):
    """A decoder and a value head as a function from a pack to values."""

    def __init__(self, model: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # values start at 0, not at noise
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_T: Tensor, layout: PackLayout, target_N: Tensor, temperature: float) -> tuple[Tensor]:
        """Value of the state in which each token at `target_N` was chosen: float32 [N]. It knows no temperature."""
        del temperature
        decoder = cast("CausalLM", self.model).get_decoder()
        output = decoder(input_ids=tokens_T[None], position_ids=layout.position_ids_1T, use_cache=False, packed=layout)
        hidden_ND = output.last_hidden_state[0][target_N - 1]
        return (self.head(hidden_ND.to(self.head.weight.dtype)).squeeze(-1).float(),)


class FrozenModel:
    """Log-probs of the sampled tokens under a model that isn't trained: a reference or a teacher."""

    def __init__(self, passes: Passes, *, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._passes = passes
        self._around = around

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """[T] a micro-batch, 0 where nothing is trained. Collective where the network is split."""
        with self._around():
            return self._passes.values(batches, temperature)


def read_frozen(
    folder: str | Path, dtype: torch.dtype, device: torch.device, placement: Placement, *, vocabulary: int, role: str
) -> FrozenModel:
    """A frozen model of an HF folder.

    Raises:
        TrainingError: No such model, or its vocabulary differs from the policy's.
    """
    try:
        model = read_model(folder, dtype, device)
    except TrainingError as error:
        raise TrainingError(f"{role} model: {error}") from error
    found = cast("CausalLM", model).get_output_embeddings().weight.shape[0]
    if found != vocabulary:
        raise TrainingError(
            f"{role} model {folder} has a vocabulary of {found} tokens, the policy's has {vocabulary}: token ids must "
            "mean the same; choose a model with the policy's tokenizer"
        )
    model.eval().requires_grad_(requires_grad=False)
    network = placement.place(PolicyForward(model), decoder_blocks(model), trained=False)
    return FrozenModel(WholePasses(network, every_micro_batch=placement.every_micro_batch))


class HfCritic:
    """A critic over a decoder of transformers, as it is trained and saved."""

    def __init__(self, network: nn.Module, placement: Placement) -> None:
        self.network = network
        self._placement = placement

    def saved(self) -> dict[str, Tensor]:
        self._placement.release(self.network)
        return dict(self.network.state_dict())

    def saved_shapes(self) -> dict[str, list[int]]:
        return {name: [*tensor.shape] for name, tensor in self.network.state_dict().items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        self.network.load_state_dict(dict(saved))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return cast("dict[str, Any]", get_optimizer_state_dict(self.network, optimizer))

    def set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.network, optimizer, state)


def read_critic(
    folder: str | Path, dtype: torch.dtype, device: torch.device, placement: Placement, *, recompute: bool
) -> HfCritic:
    """A critic whose decoder starts from an HF folder.

    Raises:
        TrainingError: No such model.
    """
    try:
        model = read_model(folder, dtype, device)
    except TrainingError as error:
        raise TrainingError(f"critic model: {error}") from error
    language_model = cast("CausalLM", model)
    hidden_size = language_model.get_output_embeddings().weight.shape[1]
    if recompute:
        recompute_activations(model)
    blocks: Sequence[nn.Module] = decoder_blocks(model)
    decoder = cast("nn.Module", language_model.get_decoder())
    network = ValueForward(_OnlyDecoder(decoder), hidden_size).to(dtype)
    return HfCritic(placement.place(network, blocks, trained=True), placement)


class _OnlyDecoder(nn.Module):
    """Drops the output matrix, which a critic has no use for."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def get_decoder(self) -> nn.Module:
        return self.decoder
