"""Micro-batches over pipeline stages, by Megatron-Core's schedule (one forward, one backward, in turn), with packs of any length.

    stage 0: tokens ─▶ hidden states ─▶ … last stage: log-probs ─▶ loss ─▶ … gradients of hidden states ─▶ stage 0

All stages of a pipeline have the same rows; only the last one computes losses and counts statistics, and tells the others.
Shapes: T tokens of a pack, N trained tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor

from stages.training.batches import MicroBatch
from stages.training.megatron.forward import MegatronForward
from stages.training.passes import LossOf, placed
from stages.training.statistics import Tally

AtEnd = Callable[[MicroBatch, tuple[Tensor, ...]], object]


class Stages:
    """The ranks that are one pipeline, in order of their stages."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.rank = group.rank()
        self.size = group.size()

    @property
    def is_last(self) -> bool:
        """This rank has log-probs."""
        return self.rank == self.size - 1

    def from_last(self, thing: object) -> Any:  # whatever the last stage has, of any picklable type
        """The last stage's object, on every stage."""
        box = [thing]
        dist.broadcast_object_list(box, group=self._group, group_src=self.size - 1)
        return box[0]

    def spread_last(self, tensor: Tensor) -> None:
        """The last stage's values, in place."""
        dist.broadcast(tensor, group=self._group, group_src=self.size - 1)

    def merged(self, one: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The stages' tables in one, the same everywhere, sorted by name."""
        everyone: list[Any] = [None] * self.size  # torch fills in what each rank gave
        dist.all_gather_object(everyone, dict(one), group=self._group)
        found = {name: shape for table in everyone for name, shape in table.items()}
        return {name: found[name] for name in sorted(found)}

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """CPU tensors of all stages, on the first one; the others keep their own. A name that several have comes once."""
        if self.size == 1:
            return dict(tensors)
        everyone: list[Any] = [None] * self.size
        listed = [(name, tensors[name].shape, tensors[name].dtype) for name in sorted(tensors)]
        dist.all_gather_object(everyone, listed, group=self._group)
        found = dict(tensors)
        known = {name for name, _, _ in everyone[0]}
        for stage in range(1, self.size):
            for name, shape, dtype in everyone[stage]:
                if name in known:
                    continue
                known.add(name)
                if self.rank == stage:
                    dist.send(tensors[name].to(self._device), group=self._group, group_dst=0)
                elif self.rank == 0:
                    piece = torch.empty(shape, dtype=dtype, device=self._device)
                    dist.recv(piece, group=self._group, group_src=stage)
                    found[name] = piece.cpu()
        return found


class PipelinedPasses:
    """An update's micro-batches through the stages."""

    def __init__(
        self, network: MegatronForward, stages: Stages, around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Args:
        network: this rank's stage.
        stages: the pipeline.
        around: entered for each run of the schedule.
        """
        self._network = network
        self._stages = stages
        self._around = around

    def values(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        def keep(batch: MicroBatch, output: tuple[Tensor, ...], **_unused: object) -> Tensor:
            return placed(output[:1], batch)[0]

        with torch.no_grad():
            found = self._run(batches, temperature, keep, forward_only=True)
        if not self._stages.is_last:
            found = [batch.weight_T.new_zeros(batch.weight_T.shape) for batch in batches]
        for values_T in found:
            self._stages.spread_last(values_T)
        return found

    def backward(self, batches: Sequence[MicroBatch], temperature: float, loss_of: LossOf) -> None:
        def loss(batch: MicroBatch, output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, None]:
            value = loss_of(batch, placed(output, batch))
            return value, torch.zeros((), dtype=torch.int), None  # the count is for a division that isn't asked for

        self._run(batches, temperature, loss, forward_only=False)

    def share(self, tally: Tally) -> None:
        tally.take_over(self._stages.from_last(tally.counted))

    def _run(
        self, batches: Sequence[MicroBatch], temperature: float, at_end: AtEnd, *, forward_only: bool
    ) -> list[Tensor]:
        """What `at_end` gave on the last stage, with data in place of a loss where only forward."""
        if not batches:  # the same on every rank
            return []

        def step(waiting: Iterator[MicroBatch], network: MegatronForward) -> tuple[object, Callable[..., object]]:
            batch = next(waiting)
            output = network(batch.tokens_T, batch.layout, batch.target_N, temperature)
            return output, partial(at_end, batch)

        with self._around():
            found: list[Any] = forward_backward_pipelining_without_interleaving(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=self._network,
                num_microbatches=len(batches),
                seq_length=1,  # shapes travel ahead of the states
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return found
