"""One stage of a pipeline: its forward and backward passes, and the updates of its weights.

[Note: passes and mini-batches]
A mini-batch leads to one update; it has one forward and one backward pass, or several with gradient accumulation.
Passes are numbered from 0 and run in order. The order of passes in a stage is fixed, and never depends on the arrival
of messages. So a stage computes the same bits in its own process as together with all others in one process.

[Note: clipping across stages]
The squared norm of a gradient is summed along the backward pass, and is complete at the first stage, which sends it to
the others with its next activations. Those belong to a mini-batch before the next use of the same replica: so the
update can wait for them without a stall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import foreach_norm, tensors_in
from lightning_pipesync.methods.ea_pipe.channels import Channels
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.randomness import drawing
from lightning_pipesync.methods.ea_pipe.schedule import Schedule
from lightning_pipesync.methods.ea_pipe.stage_input import StageInput
from lightning_pipesync.methods.ea_pipe.weights import weights_for
from lightning_pipesync.methods.gradients.hyperparameters import Hyperparameters, current, in_use

DIFFERENT_BATCHES = (
    "The stages have different mini-batches: input and target would not belong together. All ranks must load the same "
    "data in the same order, augmented by the same random numbers. If the script draws its data, seed it first: "
    "seed_everything(1)."
)

#: Returns the input of the first layer.
Source = Callable[[], Any]
#: Returns the loss, 0-dim, for an output of the last layer, the index of its part of the batch, and the number of
#: parts.
Loss = Callable[[Any, int, int], Tensor]


@dataclass(frozen=True)
class _Pass:
    """A forward pass that waits for its backward pass."""

    step: int
    is_last: bool
    stage_input: StageInput | None
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

    Args:
        layers: the layers of this stage.
        parameters: the parameters of the layers, and others that are trained on this stage.
        buffers: the buffers of the layers, and others of this stage.
        optimizer: the optimizer of the parameters.
        schedule: the schedule of this stage.
        config: the settings.
        channels: the channels to the neighbors.
        device: the device of the layers.

    Attributes:
        layers: the layers of this stage.
        step: the mini-batch of the next forward pass, from 0.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[Tensor],
        optimizer: Optimizer,
        schedule: Schedule,
        config: EAPipeConfig,
        channels: Channels,
        device: torch.device,
    ) -> None:
        self.layers, self._optimizer, self._schedule, self._config = layers, optimizer, schedule, config
        self._channels = channels
        self._parameters, self._buffers = list(parameters), list(buffers)
        self._device = device
        self.weights = weights_for(config.algorithm)(parameters, buffers, optimizer, schedule, config)
        self.step = self._num_passes = 0
        self._passes: deque[_Pass] = deque()
        self._partial: list[Tensor | None] | None = None
        self._complete: tuple[_Pass, Tensor | None] | None = None
        self._waiting: deque[_Waiting] = deque()
        self._norms: list[Tensor] = []
        self._training = False
        self.weights.load_master()

    @property
    def is_first(self) -> bool:
        """Whether this stage is the first one, which takes the mini-batches."""
        return self._channels.activations_in is None

    @property
    def is_last(self) -> bool:
        """Whether this stage is the last one, which computes the loss."""
        return self._channels.activations_out is None

    def forward(
        self, source: Source, loss: Loss, *, completes: bool = True, digest: int | None = None
    ) -> Tensor | None:
        """Runs the next forward pass.

        Args:
            source: returns the input of the first layer; called on the first stage only.
            loss: called on the last stage only.
            completes: whether this is the last pass of the mini-batch.
            digest: a digest of the mini-batch, to compare; None: no comparison.

        Returns:
            The loss, detached, on the last stage.

        Raises:
            RuntimeError: the last stage has another mini-batch than the first one.
        """
        self._begin_training()
        stage_input, norms = None, self._take_norms()
        if self._channels.activations_in is not None:
            tree, norms, of_first = self._channels.activations_in.receive()
            if self.is_last and of_first != digest:
                raise RuntimeError(DIFFERENT_BATCHES)
            digest = of_first
            self._channels.activations_in.expect()
            self._apply_waiting(norms)
            stage_input = StageInput(tree)
        self.weights.for_forward(self.step)
        result = None
        if stage_input is None:
            with self._drawing(None):
                value = source()
        else:
            value = stage_input.tree
        with self._drawing(self._schedule.stage), self.weights.computing():
            output = self.layers(value)
        if self._num_passes == 0:
            self._check_buffers()
        if self._channels.activations_out is None:
            with self._drawing(None):
                output = loss(output, 0, 1)
            result = output.detach()
        else:
            assert self._channels.gradients_in is not None
            self._channels.activations_out.send((output, norms, digest))
            self._channels.gradients_in.expect()
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._passes.append(self._count(completes, stage_input, outputs))
        return result

    def backward(self) -> bool:
        """Runs the next backward pass, unless the pipeline is still filling.

        Returns:
            Whether the gradient of a mini-batch is complete: then ``p.grad`` holds it, and :meth:`update` follows.
        """
        return len(self._passes) > self._schedule.lag and self._backward()

    def update(self, optimizer_step: Callable[[], object] | None = None) -> None:
        """Applies the complete gradient, with the hyper-parameters at its forward pass.

        Args:
            optimizer_step: ``optimizer.step`` if None.
        """
        assert self._complete is not None
        (one, squared_norm), self._complete = self._complete, None
        waiting = _Waiting(
            one.step,
            self._gradients(),
            one.hyperparameters,
            optimizer_step or self._optimizer.step,
        )
        self._set_gradients(None)
        self._waiting.append(waiting)
        if squared_norm is None:
            self._apply(None)
        else:
            self._apply_in_time(squared_norm)

    def finish_backward(self, update: Callable[[], object]) -> None:
        """Runs the remaining backward passes; calls ``update`` after each that completes a gradient."""
        while self._passes:
            if self._backward():
                update()

    def finish(self) -> None:
        """Applies the remaining updates and loads the master. Call it after :meth:`finish_backward`."""
        if not self._training:
            return
        norms = self._take_norms()
        if self._channels.activations_in is not None:
            norms = self._channels.activations_in.receive()
            self._apply_waiting(norms)
        if self._channels.activations_out is not None:
            self._channels.activations_out.send(norms)
        for sender in (self._channels.activations_out, self._channels.gradients_out):
            if sender is not None:
                sender.finish()
        self._training = False
        self.weights.load_master()

    @torch.no_grad()
    def infer(self, source: Source) -> Any:
        """Runs the master on the result of ``source``; returns the output of the last layer, None elsewhere."""
        assert not self._training
        value = source() if self._channels.activations_in is None else self._channels.activations_in.receive()
        output = self.layers(value)
        if self._channels.activations_out is None:
            return output
        self._channels.activations_out.send(output)
        self._channels.activations_out.finish()  # at most one batch ahead; delivered before the end
        return None

    def _check_buffers(self) -> None:
        """Checks that the layers have not replaced a buffer that is replicated.

        Raises:
            RuntimeError: they have replaced one.
        """
        known = {id(buffer) for buffer in self._buffers}
        for name, buffer in self.layers.named_buffers():
            if id(buffer) not in known and self.weights.replicates_buffers:
                raise RuntimeError(
                    f"The layers replace their buffer {name} by another tensor, and each replica needs its own: write "
                    "to it in place, as with copy_()."
                )

    def _begin_training(self) -> None:
        if not self._training:
            self.weights.leave_master()
            self._training = True

    def _count(self, completes: bool, stage_input: StageInput | None, outputs: list[Tensor]) -> _Pass:
        """Counts a forward pass."""
        made = _Pass(self.step, completes, stage_input, outputs, current(self._optimizer))
        self._num_passes += 1
        self.step += completes
        return made

    def reset(self) -> None:
        """Restarts with the first mini-batch, from the current weights and the current state of the optimizer."""
        self.step = self._num_passes = 0
        self.weights.reset()
        self.weights.load_master()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to resume this stage bit for bit; call it after :meth:`finish`."""
        return {"step": self.step, "passes": self._num_passes, "weights": self.weights.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the result of :meth:`state_dict`."""
        self.step, self._num_passes = state["step"], state["passes"]
        self.weights.load_state_dict(state["weights"])
        self.weights.load_master()

    def close(self, timeout_s: float) -> None:
        """Ends the threads."""
        for receiver in (self._channels.activations_in, self._channels.gradients_in):
            if receiver is not None:
                receiver.close(timeout_s)

    def _backward(self) -> bool:
        one = self._passes.popleft()
        self.weights.for_backward(one.step)
        self._restore_partial()
        squared_norm = None
        gradients: list[Tensor | None] = [None]
        if self._channels.gradients_in is not None:
            gradients, squared_norm = self._channels.gradients_in.receive()
        pairs = [
            (output, gradient)
            for output, gradient in zip(one.outputs, gradients, strict=True)
            if self.is_last or gradient is not None
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        if one.is_last and self._config.clip_norm is not None:
            squared_norm = self._squared_norm(squared_norm)
        if self._channels.gradients_out is not None:
            assert one.stage_input is not None
            self._channels.gradients_out.send((one.stage_input.gradients, squared_norm))
        return self._keep(one, squared_norm)

    def _keep(self, one: _Pass, squared_norm: Tensor | None) -> bool:
        """Keeps the gradient after a backward pass; returns whether it is complete."""
        if one.is_last:
            self._complete = one, squared_norm
        else:  # where no zero_grad() reaches it
            self._partial = self._gradients()
            self._set_gradients(None)
        return one.is_last

    def _restore_partial(self) -> None:
        """Restores the accumulated gradients of earlier passes of the same mini-batch."""
        self._set_gradients(self._partial)
        self._partial = None

    def _apply_in_time(self, squared_norm: Tensor) -> None:
        """Applies the newest gradient once its norm over all stages is known: on the first stage, now."""
        if self.is_first:
            norm = squared_norm.sqrt()
            self._norms.append(norm)
            self._apply(norm)

    def _apply_waiting(self, norms: list[Tensor]) -> None:
        for norm in norms:
            self._apply(norm)

    def _apply(self, norm: Tensor | None) -> None:
        """Applies the oldest waiting gradient, clipped if its norm is given."""
        one = self._waiting.popleft()
        self.weights.for_backward(one.step)
        self._set_gradients(one.gradients)
        if norm is not None:
            assert self._config.clip_norm is not None
            nn.utils.clip_grads_with_norm_(self._parameters, self._config.clip_norm, norm)
        later = [waiting.hyperparameters for waiting in self._waiting] + [made.hyperparameters for made in self._passes]
        with in_use(self._optimizer, one.hyperparameters, later):
            self.weights.update(one.step, one.optimizer_step)
        self._set_gradients(None)

    def _squared_norm(self, of_later_stages: Tensor | None) -> Tensor:
        norms = foreach_norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        own = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._device)
        return own if of_later_stages is None else of_later_stages + own

    def _take_norms(self) -> list[Tensor]:
        norms, self._norms = self._norms, []
        return norms

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _set_gradients(self, gradients: list[Tensor | None] | None) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.grad = None if gradients is None else gradients[i]

    def _drawing(self, place: int | None) -> Any:
        return drawing(self._config.seed, self._num_passes, place, self._device)
