"""Pipe-SGD in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import MIB, buffer_reader
from lightning_pipesync.core.comm_queue import CommQueue
from lightning_pipesync.core.consistency import collect_consistent_parameters, raise_on_all_ranks
from lightning_pipesync.core.exchange import exchange_fused
from lightning_pipesync.core.parameters import NamedParameter, hook_gradient
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.method import (
    AveragingMethod,
    device_of,
    group_members,
    index_of,
    one_config,
    parameters_of,
    warn_of_ignored,
)
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.look_ahead import LookAhead
from lightning_pipesync.methods.pipe_sgd.pipe import GradientPipe

T = TypeVar("T")

#: MiB that travel in one piece before the training, and of buffers.
PIECE_MB = 25.0


class PipeSGD(AveragingMethod):
    """The all-reduce of one step runs under the next ones: gradients are exactly ``staleness`` steps stale.

    :meth:`step` hands over the gradient just computed, waits for that of ``staleness`` steps before, which has
    traveled in the meantime, and applies it. All ranks hold the same weights at every step. The first ``staleness``
    steps make no update.

    A plain loop::

        sync = PipeSGD(model, optimizer, compression="int8")    # all ranks now have rank 0's weights
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            sync.step()                                         # in place of optimizer.step()
        sync.drain()                                            # to apply the last gradients, too
        sync.flush()                                            # buffers (BatchNorm) are those of rank 0
        validate(model)
        sync.resume()                                           # to train on
        sync.detach()

    After :meth:`step` ``p.grad`` is what was applied. With ``pipeline_level=2`` and several backward passes before a
    step, all but the last belong under :meth:`no_sync`. With a loss scaler::

        sync.after_backward(loss_scale=scaler.get_scale())
        sync.step(lambda: scaler.step(optimizer))
        scaler.update()

    Args:
        module: the model, the same on all ranks.
        optimizer: one or several torch optimizers over its parameters; one, with ``pipeline_level=2``.
        config: the settings; or give them as keywords, see :class:`PipeSGDConfig`.
        backend: of the traffic, see :class:`Transport`.

    Attributes:
        config: the settings.
        transport: the way to the other ranks.

    Raises:
        ValueError: the ranks differ in settings or model, or the model or optimizer is one that cannot be trained so.
        RuntimeError: ``torch.distributed`` is not initialized.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: PipeSGDConfig | None = None,
        *,
        backend: str | None = None,
        **settings: Any,
    ) -> None:
        self.config = one_config(PipeSGDConfig, config, settings)
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.transport = Transport(device_of(module), timeout_s=self.config.timeout_s, backend=backend)
        try:
            parameters = collect_consistent_parameters(self.transport, self.config, module, self._optimizers)
            raise_on_all_ranks(self.transport, self._problem())
        except ValueError:
            self.transport.close()
            raise
        warn_of_ignored(self.config, self.transport.rank)
        exchange_fused([parameter.tensor for parameter in parameters], PIECE_MB, self.transport.broadcast)
        self._read_buffers = buffer_reader(module)
        exchange_fused(self._read_buffers(), PIECE_MB, self.transport.broadcast)
        self._module = module
        self.flushed = False
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._queue = CommQueue("pipesync-pipe-sgd", self.transport.device, self.transport.traffic)
        self._pipes = [
            GradientPipe(optimizer, of_optimizer, self.config, self._queue, self.transport)
            for optimizer, of_optimizer in zip(self._optimizers, self._by_optimizer(parameters), strict=True)
        ]
        self._begin_to_watch(parameters)
        self._look_ahead: LookAhead | None = None
        self._paused: list[GradientPipe] = []  # since a flush
        if self.config.predicts:
            self._look_ahead = LookAhead(module, self._pipes, lambda: self.flushed)

    def use_predicted_weights(self) -> None:
        """Swaps in the weights that the updates on their way lead to, as far as this rank knows.

        Every forward pass of the module, or of one within it, begins with this if gradients are enabled; it is for
        those that read parameters elsewhere, before. Does nothing if there are no such weights.
        """
        if self._look_ahead is not None and not self.flushed:
            self._look_ahead.use()

    def restore_true_weights(self) -> None:
        """Swaps in the weights after the last update, which are the same on all ranks.

        A step does this for its own optimizer; it is for those that read weights between the steps of several.

        Raises:
            RuntimeError: somebody has written to the predicted weights, which would be lost.
        """
        if self._look_ahead is not None:
            self._look_ahead.pause()

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Within it the parameters hold the true weights, to be read or written in the midst of a step."""
        paused = [] if self._look_ahead is None else self._look_ahead.pause()
        try:
            yield
        finally:
            for pipe in paused:
                pipe.forget_prediction()  # they may have been written to
                pipe.use_predicted_weights()

    def after_backward(self, optimizer: Optimizer | None = None, loss_scale: float = 1.0) -> bool:
        """Hands over this step's gradient, and has ``p.grad`` be the one that is about to be applied, not yet clipped.

        Args:
            optimizer: whose gradient is complete; may be left out if there is but one.
            loss_scale: by which it is too large. The one that comes back is too large by the same factor, and not
                finite on any rank if it was not on one.

        Raises:
            RuntimeError: a peer is lost.
        """
        pipe = self._pipe(optimizer)
        if pipe.handed_over:
            return False
        self._paused.clear()
        if self._members != group_members(self._optimizers):
            parameters = collect_consistent_parameters(self.transport, self.config, self._module, self._optimizers)
            for one, of_optimizer in zip(self._pipes, self._by_optimizer(parameters), strict=True):
                one.begin_anew(of_optimizer)
            self._begin_to_watch(parameters)
        pipe.hand_over(loss_scale)
        return False

    def before_unscaling(self, optimizer: Optimizer | None = None, loss_scale: float | None = None) -> None:
        """Hands over the gradient; a scaler then unscales the one that is about to be applied, and looks at it."""
        self.after_backward(optimizer, 1.0 if loss_scale is None else loss_scale)

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clips the gradient that is about to be applied by its L2 norm."""
        self.after_backward(optimizer)
        trained = self._trained(optimizer)
        torch.nn.utils.clip_grad_norm_(self.clipped_along(trained), max_norm)
        return torch.nn.utils.clip_grad_norm_(trained, max_norm)

    def clip_value(self, max_value: float, optimizer: Optimizer | None = None) -> None:
        """Clips every value of the gradient that is about to be applied to ``[-max_value, max_value]``."""
        self.after_backward(optimizer)
        trained = self._trained(optimizer)
        torch.nn.utils.clip_grad_value_([*trained, *self.clipped_along(trained)], max_value)

    def clipped_along(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns what holds this rank's part of the gradients that were handed over last, to predict with."""
        return [gradient for pipe in self._pipes for gradient in pipe.own_gradients(parameters)]

    def step(self, update: Callable[[], T] | None = None, optimizer: Optimizer | None = None) -> T | None:
        """Updates the weights by the gradient of ``staleness`` steps before, with the hyper-parameters of that step.

        Raises:
            RuntimeError: a peer is lost.
        """
        self.flushed = False
        return self._pipe(optimizer).run(update, hand_over=lambda: self.after_backward(optimizer))

    def drain(self, before_update: Callable[[Optimizer], object] = lambda _: None) -> None:
        """Applies the gradients that are still on their way, in order; a collective call.

        Args:
            before_update: called when ``p.grad`` is what is about to be applied, to clip it, say.
        """
        for pipe in self._pipes:
            pipe.drain(before_update)
        self.flushed = False

    def flush(self) -> None:
        """Gives all ranks the buffers of rank 0; the true weights are the same already. A collective call."""
        self._paused += [] if self._look_ahead is None else self._look_ahead.pause()
        self._queue.wait_all()  # broadcasts and all-reduces have one order on all ranks
        exchange_fused(self._read_buffers(), PIECE_MB, self.transport.broadcast)
        self.flushed = True

    def resume(self) -> None:
        """Undoes :meth:`flush`: flushed weights are those that training goes on from, or predicts from."""
        self.flushed = False
        for pipe in self._paused:
            pipe.use_predicted_weights()  # it was flushed in the midst of a step
        self._paused.clear()

    def metrics(self) -> dict[str, float]:
        """Returns the number of updates, by how many the last was late, MiB sent and seconds of exposed communication.

        With several optimizers the updates are those of all, and the delay that of the first.
        """
        traffic = self.transport.traffic
        return {
            "updates": sum(pipe.num_updates for pipe in self._pipes),
            "staleness": self._pipes[0].staleness,
            "mib_sent": traffic.total_bytes_sent / MIB,
            "exposed_seconds": traffic.total_seconds_waited,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the gradients in flight, which rank 0 alone has whole, and what the codec needs; a collective call.

        Optimizers are not in it: theirs are as without Pipe-SGD, and the same on all ranks.
        """
        return {"settings": self._shape_settings(), "pipes": [pipe.state_dict() for pipe in self._pipes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned, weights and optimizers being loaded already; collective.

        Raises:
            ValueError: the state is of other settings.
        """
        if state["settings"] != self._shape_settings():
            raise ValueError(
                f"The checkpoint was written with {state['settings']}, this run has {self._shape_settings()}. Use the "
                "same settings, or remove the key 'pipesync' from the checkpoint to begin with an empty pipeline."
            )
        self._queue.wait_all()
        for pipe, saved in zip(self._pipes, state["pipes"], strict=True):
            pipe.load_state_dict(saved)

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the threads and the process groups. The weights stay as they are; gradients in flight are dropped."""
        if self._look_ahead is not None:
            self._look_ahead.close()
            self._look_ahead = None
        for hook in self._hooks.values():
            hook.remove()
        for pipe in self._pipes:
            pipe.guard.release()
        self._queue.close(timeout_s)
        self.transport.close(timeout_s)

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        pipe = self._pipe_of.get(id(parameter))
        if pipe is not None:  # otherwise no optimizer has it any more
            pipe.gradient_is_ready(parameter, send=self.syncing)

    def _begin_to_watch(self, parameters: Sequence[NamedParameter]) -> None:
        """Remembers what the optimizers have now, and watches their gradients."""
        self._members = group_members(self._optimizers)
        self._pipe_of = {id(p.tensor): self._pipes[p.group[0]] for p in parameters if p.group}
        for parameter in parameters:
            if parameter.group and id(parameter.tensor) not in self._hooks:
                self._hooks[id(parameter.tensor)] = hook_gradient(parameter.tensor, self._gradient_is_ready)

    def _by_optimizer(self, parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
        return [
            [parameter for parameter in parameters if parameter.group and parameter.group[0] == index]
            for index in range(len(self._optimizers))
        ]

    def _trained(self, optimizer: Optimizer | None) -> list[Tensor]:
        return parameters_of(self._pipe(optimizer).optimizer)

    def _pipe(self, optimizer: Optimizer | None) -> GradientPipe:
        return self._pipes[index_of(optimizer, self._optimizers, "PipeSGD")]

    def _shape_settings(self) -> dict[str, Any]:
        """The settings that decide what :meth:`state_dict` looks like."""
        config = self.config
        settings: dict[str, Any] = {
            "staleness": config.staleness,
            "delay_compensation": config.delay_compensation,
            "error_feedback": config.feeds_back,
        }
        if config.feeds_back:
            names = ("bucket_mb", "pipeline_level", "segments")
            settings |= {"compression": str(config.compression), **{name: getattr(config, name) for name in names}}
        return settings

    def _problem(self) -> ValueError | None:
        config = self.config
        if config.pipeline_level == 2 and len(self._optimizers) > 1:
            return ValueError(
                f"pipeline_level=2 sends gradients in the backward pass, and with {len(self._optimizers)} optimizers "
                "it cannot know whose step follows: use pipeline_level=1."
            )
        for optimizer in self._optimizers:
            if config.reduces_learning_rate and not all("lr" in group for group in optimizer.param_groups):
                return ValueError(
                    f"delay_compensation={config.delay_compensation!r} changes the learning rate, and "
                    f"{type(optimizer).__name__} has none: use delay_compensation='none'."
                )
        return None
