"""The trained policy as a step backend sees it, and the one over an HF model, placed whole or split, with or without adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from stages.learning.forward import CausalLM, PolicyForward
from stages.training.lora import ADAPTER_FOLDER, LoraModel, LoraSettings
from stages.training.model_folder import read_model
from stages.training.networks import decoder_blocks, recompute_activations
from stages.training.placement import Placement


class TrainedModel(Protocol):
    """A model that is trained and saved; the calls are collective."""

    @property
    def network(self) -> nn.Module:
        """(tokens, layout, targets, temperature) → a number or more for each target: log-probs and entropies, or values."""
        ...

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of this rank's weights, sharing their memory or to be given back to `load`."""
        ...

    def saved_shapes(self) -> dict[str, list[int]]:
        """Of what a checkpoint keeps over all ranks; not collective."""
        ...

    def load(self, saved: Mapping[str, Tensor]) -> None: ...
    def optimizer_state(
        self, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:  # torch's own type for it is no more precise
        """What a checkpoint keeps of its optimizer."""
        ...

    def set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None: ...


class Policy(TrainedModel, Protocol):
    """The trained policy."""

    @property
    def layout(self) -> str:
        """Names the form of what is saved: checkpoints of one form can't be read in another."""
        ...

    @property
    def vocabulary(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def attention_width(self) -> int:
        """Query heads times head size."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The whole weights under HF names, on the CPU; only rank 0 is sure to have them."""
        ...

    def shapes(self) -> dict[str, list[int]]:
        """Of the whole weights, by HF name."""
        ...

    def write_extras(self, folder: Path) -> None:
        """What an exported folder has beside the whole weights. Collective; rank 0 writes."""
        ...

    def base(self) -> Callable[[], AbstractContextManager[None]] | None:
        """A context in which the network is what it was before training, where that costs nothing."""
        ...


class HfPolicy:
    """A causal language model of transformers."""

    def __init__(
        self,
        folder: str,
        placement: Placement,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recompute: bool = False,
        lora: LoraSettings | None = None,
        is_writer: bool = True,
    ) -> None:
        self._placement = placement
        self._is_writer = is_writer
        self.model = read_model(folder, dtype, device)
        language_model = cast("CausalLM", self.model)
        self.vocabulary = language_model.get_output_embeddings().weight.shape[0]
        blocks = decoder_blocks(self.model)
        self.num_layers = len(blocks)
        self.attention_width = attention_width(self.model)
        self._lora = None if lora is None else LoraModel(self.model, lora, folder)
        self.layout = "hf" if lora is None else f"lora, alpha {lora.alpha:g}"
        if recompute:
            recompute_activations(self.model)
        self.network = placement.place(PolicyForward(self.model), blocks, trained=True)

    def tensors(self) -> dict[str, Tensor]:
        state, whole = self._state(), self._placement.whole
        if self._lora is not None:
            return self._lora.merged(state, whole)
        return {name: whole(tensor) for name, tensor in state.items()}

    def shapes(self) -> dict[str, list[int]]:
        state = self._state()
        return {name.replace(".base_layer.", "."): [*state[name].shape] for name in state if ".lora_" not in name}

    def saved(self) -> dict[str, Tensor]:
        state = self._state()
        if self._lora is None:
            return state
        return {name: tensor for name, tensor in state.items() if ".lora_" in name}

    def saved_shapes(self) -> dict[str, list[int]]:
        return {name: [*tensor.shape] for name, tensor in self.saved().items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(dict(saved), strict=False)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return cast("dict[str, Any]", get_optimizer_state_dict(self.network, optimizer))

    def set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.network, optimizer, state)

    def write_extras(self, folder: Path) -> None:
        if self._lora is None:
            return
        tensors = self._lora.adapter(self._state(), self._placement.whole)
        if self._is_writer:
            self._lora.write_adapter(tensors, folder / ADAPTER_FOLDER)

    def base(self) -> Callable[[], AbstractContextManager[None]] | None:
        return None if self._lora is None else self._lora.disabled

    def _state(self) -> dict[str, Tensor]:
        """By HF name, sorted; a tied output matrix is left out."""
        self._placement.release(self.network)
        state = self.model.state_dict()
        tied = bool(getattr(self.model.config, "tie_word_embeddings", False))
        return {name: state[name] for name in sorted(state) if not (tied and name == "lm_head.weight")}


def attention_width(model: nn.Module) -> int:
    """Query heads times head size, from a model's config."""
    config = model.config
    heads = int(getattr(config, "num_attention_heads", 0))
    return heads * int(getattr(config, "head_dim", 0) or getattr(config, "hidden_size", 0) // max(1, heads))
