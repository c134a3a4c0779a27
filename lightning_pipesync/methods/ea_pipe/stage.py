"""One stage of a pipeline: its forward and backward passes, and the updates of its weights.

[Note: passes and mini-batches]
A mini-batch leads to one update; it has one forward and one backward pass, or several with gradient accumulation.
Passes are numbered from 0 and run in order. The order of passes in a stage is fixed, and never depends on when messages
arrive. So a stage computes the same bits in its own process as together with all others in one process.

[Note: clipping across stages]
The squared norm of a gradient is summed along the backward pass, and is complete at the first stage, which sends it to
the others with its next activations. Those belong to a mini-batch before the next use of the same replica: so the
update can wait for them without a stall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import check_optimizer
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.core.rng import seeded
from lightning_pipesync.core.torch_private import foreach_norm, tensors_in
from lightning_pipesync.methods.ea_pipe.averages import averages_of
from lightning_pipesync.methods.ea_pipe.channels import Channels, Schedule
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.split import LayerInput
from lightning_pipesync.methods.ea_pipe.weights import WEIGHTS
from lightning_pipesync.methods.hyperparameters import Hyperparameters, current, in_use

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
#: Returns the input of the model: its only argument, or a :class:`Call`.
Source = Callable[[], Any]
#: Returns the loss, 0-dim, for an output of the model and a function that returns the output's part of a batch.
Loss = Callable[[Any, Callable[[Any], Any]], Tensor]

DIFFERENT_BATCHES = (
    "The stages have different mini-batches: input and target would not belong together. All ranks must load the same "
    "data in the same order, augmented by the same random numbers. If the script draws its data, seed it first: "
    "seed_everything(1)."
)


@dataclass(frozen=True)
class _Pass:
    """A forward pass that waits for its backward pass."""

    step: int
    is_last: bool
    stage_input: LayerInput | None
    outputs: list[Tensor]
    hyperparameters: Hyperparameters


@dataclass(frozen=True)
class _Waiting:
    """A gradient that waits for its norm over all stages."""

    step: int
    gradients: list[Tensor | None]
    hyperparameters: Hyperparameters
    optimizer_step: Callable[[], object]


class ModelStage:
    """The layers of one stage, in training.

    ``others`` are further parameters and buffers that this stage trains, and ``line`` connects the ranks that have this
    stage in several pipelines.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        others: Sequence[Tensor],
        optimizer_factory: OptimizerFactory | None,
        schedule: Schedule,
        config: EAPipeConfig,
        channels: Channels,
        device: torch.device,
        line: Transport | None = None,
    ) -> None:
        self._layers, self._schedule, self._config = nn.Sequential(*layers).to(device), schedule, config
        self._channels, self._device = channels, device
        self._parameters = [*self._layers.parameters(), *(t for t in others if isinstance(t, nn.Parameter))]
        self._buffers = [*self._layers.buffers(), *(t for t in others if not isinstance(t, nn.Parameter))]
        self._optimizer = _optimizer_for(self._parameters, optimizer_factory)
        self.weights = WEIGHTS[config.algorithm](self._parameters, self._buffers, self._optimizer, schedule, config)
        other_buffers = [tensor for tensor in others if not isinstance(tensor, nn.Parameter)]
        self._averages = averages_of(
            line, self._layers, self._parameters, other_buffers, self.weights, self._optimizer, config
        )
        self.step = self._num_passes = 0  # of the next mini-batch; of forward passes
        self._passes: deque[_Pass] = deque()
        self._partial: list[Tensor | None] | None = None
        self._complete: tuple[_Pass, Tensor | None] | None = None
        self._waiting: deque[_Waiting] = deque()
        self._norms: list[Tensor] = []
        self._training = False
        self.weights.load_master()

    @property
    def is_complete(self) -> bool:
        """Whether ``p.grad`` holds the gradient of a mini-batch, so that :meth:`update` follows."""
        return self._complete is not None

    def forward(
        self, source: Source, loss: Loss, *, completes: bool = True, digest: int | None = None
    ) -> Tensor | None:
        """Runs the next forward pass; returns the loss, detached, on the last stage.

        The last stage raises a RuntimeError if its mini-batch, of which ``digest`` is a digest, is not the first one's.
        """
        self._begin_training()
        is_last = self._channels.activations_out is None
        stage_input, norms = None, self._take_norms()
        if self._channels.activations_in is not None:
            tree, norms, of_first = self._receive(flushing=False)
            if is_last and of_first != digest:
                raise RuntimeError(DIFFERENT_BATCHES)
            digest = of_first
            self._channels.activations_in.expect()
            self._apply_waiting(norms)
            stage_input = LayerInput(tree)
        self.weights.for_forward(self.step)
        value = self._input_of(source) if stage_input is None else stage_input.tree
        with self._profiled("forward", self.step):
            with self._drawing(self._schedule.stage), self.weights.computing():
                output = self._layers(value)
            if self._num_passes == 0:
                self._check_buffers()
            if is_last:
                with self._drawing(None):
                    output = loss(output, lambda batch: batch)
        if not is_last:
            assert self._channels.activations_out is not None
            assert self._channels.gradients_in is not None
            self._channels.activations_out.send((output, norms, digest))
            self._channels.gradients_in.expect()
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._passes.append(self._count(completes, stage_input, outputs))
        return output.detach() if is_last else None

    def backward(self) -> bool:
        """Runs the next backward pass, unless the pipeline is still filling; returns :attr:`is_complete`."""
        if len(self._passes) > self._schedule.lag:
            self._backward()
        return self.is_complete

    def update(self, optimizer_step: Callable[[], object] | None = None) -> None:
        """Applies the complete gradient by ``optimizer_step``, with the hyper-parameters at its forward pass."""
        assert self._complete is not None
        (made, squared_norm), self._complete = self._complete, None
        optimizer_step = optimizer_step or self._optimizer.step
        self._waiting.append(_Waiting(made.step, self._take_gradients(), made.hyperparameters, optimizer_step))
        if squared_norm is None:
            self._apply(None)
        else:
            self._apply_in_time(squared_norm)

    def finish_backward(self, update: Callable[[], object]) -> None:
        """Runs the remaining backward passes, and ``update`` whenever a gradient is complete."""
        while self._passes:
            self._backward()
            if self.is_complete:
                update()

    def finish(self) -> None:
        """Applies the remaining updates and loads the master, after :meth:`finish_backward`."""
        if not self._training:
            return
        norms = self._take_norms()
        if self._channels.activations_in is not None:
            norms = self._receive(flushing=True)
            self._apply_waiting(norms)
        if self._channels.activations_out is not None:
            self._channels.activations_out.send(norms)
        for sender in (self._channels.activations_out, self._channels.gradients_out):
            if sender is not None:
                sender.finish()
        self._training = False
        self.weights.load_master()
        self._averages.consolidate(self.step)

    @torch.no_grad()
    def infer(self, source: Source) -> Any:
        """Runs the master on the result of ``source``; returns the output of the last layer, None elsewhere."""
        assert not self._training
        value = source() if self._channels.activations_in is None else self._channels.activations_in.receive()
        output = self._layers(value)
        if self._channels.activations_out is None:
            return output
        self._channels.activations_out.send(output)
        self._channels.activations_out.finish()  # so that this stage is at most one batch ahead
        return None

    def reset(self) -> None:
        """Restarts with the first mini-batch, from the current weights and optimizer state; after :meth:`finish`."""
        self.step = self._num_passes = 0
        self._partial = None
        self.weights.reset()
        self.weights.load_master()
        self._averages.reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to resume this stage bit for bit; call it after :meth:`finish`."""
        passes, averages = self._num_passes, self._averages.state_dict()
        return {"step": self.step, "passes": passes, "weights": self.weights.state_dict(), "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the result of :meth:`state_dict`; after :meth:`finish`."""
        self.step, self._num_passes = state["step"], state["passes"]
        self._partial = None
        self.weights.load_state_dict(state["weights"])
        self.weights.load_master()
        self._averages.load_state_dict(state["averages"])

    def close(self, timeout_s: float) -> None:
        self._channels.close(timeout_s)

    def _input_of(self, source: Source) -> Any:
        with self._drawing(None):
            value = source()
        if self._num_passes == 0:
            self._averages.check_input(value)
        return value

    def _receive(self, flushing: bool) -> Any:
        """Returns a message of the stage before: a list of norms if it empties the pipeline, else a tuple."""
        assert self._channels.activations_in is not None
        message = self._channels.activations_in.receive()
        if isinstance(message, list) != flushing:
            sent = "another mini-batch" if flushing else "the end of its mini-batches"
            raise RuntimeError(
                f"Stage {self._schedule.stage} has sent {sent}, and stage {self._schedule.stage + 1} expects the "
                "reverse: all ranks must train as many mini-batches, and flush the pipeline after the same ones."
            )
        return message

    def _check_buffers(self) -> None:
        """Raises a RuntimeError if the layers have replaced a buffer that is replicated."""
        known = {id(buffer) for buffer in self._buffers}
        for name, buffer in self._layers.named_buffers():
            if id(buffer) not in known and self.weights.has_replicas:
                raise RuntimeError(
                    f"The layers replace their buffer {name} by another tensor, and each replica needs its own: write "
                    "to it in place, as with copy_()."
                )

    def _begin_training(self) -> None:
        if not self._training:
            self._averages.leave(self.weights.leave_master())
            self._training = True

    def _count(self, completes: bool, stage_input: LayerInput | None, outputs: list[Tensor]) -> _Pass:
        made = _Pass(self.step, completes, stage_input, outputs, current(self._optimizer))
        self._num_passes += 1
        self.step += completes
        return made

    def _backward(self) -> None:
        made = self._passes.popleft()
        self.weights.for_backward(made.step)
        self._restore_partial()
        gradients: list[Tensor | None] = [None]  # of the loss
        squared_norm = None
        if self._channels.gradients_in is not None:
            gradients, squared_norm = self._channels.gradients_in.receive()
        is_last = self._channels.gradients_in is None
        received = zip(made.outputs, gradients, strict=True)
        if pairs := [(output, gradient) for output, gradient in received if is_last or gradient is not None]:
            with self._profiled("backward", made.step):
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        clips = made.is_last and self._config.clip_norm is not None
        if clips:
            self._averages.average_gradient()
            squared_norm = self._squared_norm(squared_norm)
        if self._channels.gradients_out is not None:
            assert made.stage_input is not None
            self._channels.gradients_out.send((made.stage_input.gradients, squared_norm))
        if made.is_last:
            if not clips:  # the stage before need not wait
                self._averages.average_gradient()
            self._complete = made, squared_norm
        else:
            self._partial = self._take_gradients()  # a framework may zero them now

    def _restore_partial(self) -> None:
        """Restores the gradient that earlier passes of the same mini-batch have accumulated."""
        self._set_gradients(self._partial)
        self._partial = None

    def _apply_in_time(self, squared_norm: Tensor) -> None:
        """Applies the newest gradient once its norm over all stages is known: on the first stage, now."""
        if self._channels.activations_in is None:
            norm = squared_norm.sqrt()
            self._norms.append(norm)
            self._apply(norm)

    def _apply_waiting(self, norms: list[Tensor]) -> None:
        for norm in norms:
            self._apply(norm)

    def _apply(self, norm: Tensor | None) -> None:
        """Applies the oldest waiting gradient, clipped if its norm is given."""
        oldest = self._waiting.popleft()
        self.weights.for_backward(oldest.step)
        self._set_gradients(oldest.gradients)
        if norm is not None:
            assert self._config.clip_norm is not None
            nn.utils.clip_grads_with_norm_(self._parameters, self._config.clip_norm, norm)
        later = [waiting.hyperparameters for waiting in self._waiting] + [made.hyperparameters for made in self._passes]
        with profiled("update"), in_use(self._optimizer, oldest.hyperparameters, later):
            self.weights.update(oldest.step, oldest.optimizer_step)
        self._averages.end_update(oldest.step)
        self._set_gradients(None)

    def _squared_norm(self, of_later_stages: Tensor | None) -> Tensor:
        norms = foreach_norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        squared = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._device)
        return squared if of_later_stages is None else of_later_stages + squared

    def _take_norms(self) -> list[Tensor]:
        norms, self._norms = self._norms, []
        return norms

    def _take_gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self._parameters]
        self._set_gradients(None)
        return gradients

    def _set_gradients(self, gradients: list[Tensor | None] | None) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.grad = None if gradients is None else gradients[i]

    def _profiled(self, direction: str, step: int) -> AbstractContextManager[object]:
        """Returns the range of a pass in profiles; its numbers are from 1, as in descriptions of the pipeline."""
        return profiled(direction, "of mini-batch", step + 1, "in stage", self._schedule.stage + 1)

    def _drawing(self, place: int | None) -> Any:
        return seeded(self._config.seed, self._num_passes, place, self._device)


def _optimizer_for(parameters: list[nn.Parameter], factory: OptimizerFactory | None) -> Optimizer:
    if factory is None or not any(parameter.requires_grad for parameter in parameters):
        return torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=0.0)  # an optimizer needs a parameter
    optimizer = factory(parameters)
    check_optimizer(optimizer)
    return optimizer
