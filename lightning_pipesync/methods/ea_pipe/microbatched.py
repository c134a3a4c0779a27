"""Synchronous pipelines with micro-batches: GPipe and 1F1B, on PyTorch's own schedules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from typing_extensions import override

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.core.torch_private import map_tensors, tensors_in
from lightning_pipesync.methods.ea_pipe.channels import places_of, rank_of
from lightning_pipesync.methods.ea_pipe.split import LayerInput
from lightning_pipesync.methods.ea_pipe.stage import DIFFERENT_BATCHES, Loss, ModelStage, Source

_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
#: The flag of a batch that cannot be divided.
_UNEVEN = 2


class MicroBatchedStage(ModelStage):
    """A stage that runs all micro-batches of a mini-batch before the next mini-batch starts.

    All micro-batches have the same size. The input of each stage is a tensor or a tuple.
    """

    def __init__(self, *args: Any, transport: Transport) -> None:
        super().__init__(*args)
        self._transport, self._places = transport, places_of(transport)
        self._group = transport.new_group()
        self._parts = self._config.micro_batches or self._schedule.num_stages
        self._pipeline: PipelineScheduleSingle | None = None
        self._shapes: list[torch.Size] = []
        self._loss: Loss

    def forward(
        self, source: Source, loss: Loss, *, completes: bool = True, digest: int | None = None
    ) -> Tensor | None:
        """Runs all passes, forward and backward."""
        self._begin_training()
        self.weights.for_forward(self.step)
        self._loss = loss
        if digest is not None:
            found = set(self._transport.job.gather_objects((self._places.ranks[0], digest)))
            if len(found) > len({pipeline for pipeline, _ in found}):
                raise RuntimeError(DIFFERENT_BATCHES)
        arguments: tuple[Any, ...] = ()
        if self._channels.activations_in is None:
            value = self._input_of(source)
            arguments = value if isinstance(value, tuple) else (value,)
        pipeline = self._pipeline_for(arguments)
        self._restore_partial()
        losses: list[Tensor] = []
        of_last_stage: dict[str, Any] = {"target": torch.arange(self._parts), "losses": losses}
        with self._drawing(self._schedule.stage), self._transport.watch.waiting("another stage"):
            is_last = self._channels.activations_out is None
            pipeline.step(*arguments, **(of_last_stage if is_last else {}), return_outputs=False)
        made = self._count(completes, None, [])
        if completes:
            squared_norm = None
            self._averages.average_gradient()
            if self._config.clip_norm is not None:
                squared = self._squared_norm(None)
                # The parameters of other stages may have another dtype.
                squared_norm = self._places.all_reduce(squared.double().reshape(1)).wait()[0].to(squared.dtype)
            self._complete = made, squared_norm
        self._partial = self._take_gradients()  # a framework may zero them now
        return torch.stack([part.detach() for part in losses]).sum() if losses else None

    def backward(self) -> bool:
        """Restores the gradient of a complete mini-batch; returns :attr:`is_complete`."""
        if self.is_complete:
            self._restore_partial()
        return self.is_complete

    def finish(self) -> None:
        if self._training:
            self._training = False
            self.weights.load_master()
            self._averages.consolidate(self.step)

    def _apply_in_time(self, squared_norm: Tensor) -> None:
        self._apply(squared_norm.sqrt())

    def _pipeline_for(self, arguments: tuple[Any, ...]) -> PipelineScheduleSingle:
        """Returns the schedule, a new one if the shapes have changed; raises a ValueError if they do not divide."""
        shapes = [tensor.shape for tensor in tensors_in(arguments)]
        uneven = max((shape[0] % self._parts for shape in shapes), default=0)
        flags = self._places.exchange_flags(_UNEVEN if uneven else int(shapes != self._shapes)).wait()
        if self._averages.on_any(_UNEVEN in flags):
            raise ValueError(
                f"The samples of a mini-batch must divide into micro_batches={self._parts} of one size: choose another "
                "batch size, and drop the last batch if it is smaller."
            )
        if any(flags) or self._pipeline is None:
            self._shapes = shapes
            self._pipeline = self._new_pipeline(_part_of(arguments, 0, self._parts))
        return self._pipeline

    def _new_pipeline(self, example: tuple[Any, ...]) -> PipelineScheduleSingle:
        """Returns a schedule for the shapes of a micro-batch, after a run through the layers that changes no buffer."""
        layers, buffers = _Tupled(self._layers), [(buffer, buffer.clone()) for buffer in self._layers.buffers()]
        if self._channels.activations_in is not None:
            received = self._channels.activations_in.receive()
            example = received if isinstance(received, tuple) else (received,)
        with self._drawing(self._schedule.stage), torch.enable_grad():
            output = layers(*LayerInput(example).tree)
        for buffer, before in buffers:
            buffer.copy_(before)
        if self._channels.activations_out is not None:
            self._channels.activations_out.send(output)
        index, count = self._schedule.stage, self._schedule.num_stages
        stage = _ProfiledStage(layers, index, count, self._device, example, output, group=self._group)
        stage.stage_index_to_group_rank = {other: rank_of(other, count) for other in range(count)}
        # Losses are already divided by the number of micro-batches.
        kind = _SCHEDULES[self._config.algorithm]
        return kind(stage, self._parts, loss_fn=self._loss_of_part, scale_grads=False)

    def _loss_of_part(self, output: Any, number: Tensor) -> Tensor:
        with self._drawing(None):
            return self._loss(output, partial(_part_of, index=int(number), count=self._parts)) / self._parts


class _ProfiledStage(PipelineStage):
    """Names the passes of micro-batches in profiles."""

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with profiled("forward of micro-batch", fwd_chunk_id + 1, "in stage", self.stage_index + 1):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with profiled("backward of micro-batch", bwd_chunk_id + 1, "in stage", self.stage_index + 1):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class _Tupled(nn.Module):
    """Passes the arguments to the layers as one tuple."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *values: Any) -> Any:
        return self.layers(values[0] if len(values) == 1 else values)


def _part_of(batch: Any, index: int, count: int) -> Any:
    """Returns one of ``count`` parts of a batch, split along the first dimension of each tensor, the samples."""
    if count == 1:
        return batch
    return map_tensors(lambda tensor: tensor.tensor_split(count)[index] if tensor.dim() else tensor, batch)
