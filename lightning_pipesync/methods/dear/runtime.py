"""DeAR in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.core.comm_queue import CommQueue
from lightning_pipesync.core.parameters import NamedParameter, hook_gradient
from lightning_pipesync.core.torch_private import foreach_norm, mark_stepped
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.backpipe import BackPipe
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.fused import FusedBuckets
from lightning_pipesync.methods.dear.order import ExecutionOrder
from lightning_pipesync.methods.dear.search import Trial
from lightning_pipesync.methods.dear.tuner import FusionTuner
from lightning_pipesync.methods.dear.tuning_file import TuningFile
from lightning_pipesync.methods.method import SyncMethod, group_members
from lightning_pipesync.methods.module_hook import ModuleHook
from lightning_pipesync.methods.step import StepGuard, replaced_step

T = TypeVar("T")


class DeAR(SyncMethod):
    """Synchronous SGD whose all-reduce is split in two, hidden under the backward pass and the next forward pass.

    What is trained is what ``DistributedDataParallel`` would train. A bucket's reduce-scatter starts when its last
    gradient is ready (BackPipe); :meth:`step` waits for all of them, and then the all-gathers start, in the order in
    which the next forward pass needs them: a module waits for its own weights only (FeedPipe).

    A plain loop::

        sync = DeAR(model, optimizer)                   # all ranks now have rank 0's weights
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            sync.step()                                 # in place of optimizer.step()
        sync.synchronize()                              # before anything but a forward pass or a state_dict reads them
        validate(model)
        sync.detach()

    ``p.grad`` stays this rank's own gradient; the average of all is never put together on one rank. With several
    backward passes before a step, all but the last belong under :meth:`no_sync`.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`DeARConfig`.
    """

    name = "dear"
    config_type = DeARConfig
    applies_grad = False
    reduces_together = True
    shards_optimizer_state = True

    config: DeARConfig
    _tuning_file: TuningFile | None = None

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        self._order = ExecutionOrder(self._module)
        self._queue = CommQueue("pipesync-dear", self.transport.device, self.transport.traffic)
        self._buckets = FusedBuckets(self._order, self.optimizers, self.config, self.transport)
        self._tuner = FusionTuner(self.config, self._buckets, self.transport, self._tuning_file)
        self._backpipe = BackPipe(self._buckets, self._order, self._queue, self._tuner, self.transport)
        self._eager = False
        self._loaded: set[int] = set()  # optimizers into which a state was loaded since the last step
        # Before the hooks of others, as of weight_norm, which read the weights.
        before_forward, before_saving = ModuleHook(self._before_forward), ModuleHook(self._before_saving)
        self._hooks = [child.register_forward_pre_hook(before_forward, prepend=True) for child in self._order.modules]
        self._hooks += [child.register_state_dict_pre_hook(before_saving) for child in self._module.modules()]
        self._hooks += [opt.register_load_state_dict_post_hook(self._after_loading) for opt in self.optimizers]
        # What steps are copies of the optimizers; these themselves never do.
        self._guards = [StepGuard(optimizer, "DeAR") for optimizer in self.optimizers]
        self._note_gradient = self._protocol.gradient_hook(0)
        self._hooked: set[int] = set()
        self._take_over(parameters)

    @property
    def fusion(self) -> Fusion:
        """How tensors are fused now."""
        return self._tuner.fusion

    @property
    def tuned(self) -> bool:
        """Whether :attr:`fusion` is final: the search for it is over, or there is none."""
        return self._tuner.finished

    @property
    def trials(self) -> Sequence[Trial]:
        """What the search for it has measured so far."""
        return self._tuner.trials

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Waits until the gradients of all ranks are averaged, each rank its shard of them; they were sent scaled."""
        # A state was loaded, or there are further parameters, as a callback adds that thaws layers.
        if self._buckets and (self._loaded or self._members != group_members(self.optimizers)):
            self._backpipe.forget()
            self.return_optimizer_states()
            self._take_over(self._agreed_parameters())
        if not self._buckets:
            self._buckets.plan(self._tuner.fusion)
        elif self._tuner.over:
            self._backpipe.drain()
            self._tuner.change()
        self._backpipe.finish()

    def _unscale(self, index: int, loss_scale: float | None) -> bool:
        """Unscales the averaged gradient, too, of which ``p.grad`` is no part.

        Returns:
            Whether some value of it is not finite, on any rank.
        """
        if loss_scale is None:
            return False
        gradients = self._own_gradients(index)
        finite = [bool(torch.isfinite(flat.mul_(1 / loss_scale)).all()) for flat in gradients]
        self._queue.wait_all()
        return any(self.transport.exchange_flags(not all(finite)).wait())

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clips the averaged gradient by its L2 norm, to which each rank contributes one number, that of its shard."""
        self.after_backward(optimizer)
        gradients = self._own_gradients(self._index(optimizer))
        squares = torch.stack(foreach_norm(gradients)).square_()  # of one type on all ranks, as the buckets are
        self._queue.wait_all()  # another optimizer's weights may be on their way
        norm = self.transport.all_reduce(squares.sum().reshape(1)).wait().sqrt()[0]
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for flat in gradients:
            flat.mul_(factor)
        return norm

    def clip_value(self, max_value: float, optimizer: Optimizer | None = None) -> None:
        """Clips every value of the averaged gradient to ``[-max_value, max_value]``."""
        self.after_backward(optimizer)
        for flat in self._own_gradients(self._index(optimizer)):
            flat.clamp_(-max_value, max_value)

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Starts to bring the weights up to date; they are when a forward pass, or :meth:`synchronize`, needs them."""
        optimizer, stepped, result = self.optimizers[index], True, None
        if update is not None:
            stepped, result = self._run(update, optimizer)
        self.after_backward(optimizer)
        if stepped:  # otherwise a loss scaler skips the step
            for bucket in self._buckets.of_optimizer(index):
                bucket.feed(self._queue)
            self._queue.flush()
        if index == 0:
            self._tuner.note_step()
        mark_stepped(optimizer)
        self.flushed = False
        self._order.begin_step()
        for parameter in self._order.used_elsewhere:
            if (used := self._buckets.with_parameter(parameter)) is not None:
                used.wait()
        if self._eager:
            self.synchronize()
        return result

    def follow(self, module: nn.Module) -> None:
        """Has :meth:`step` wait for the weights: who follows them reads them at once, before any forward pass."""
        self._eager = True

    def synchronize(self) -> None:
        """Waits until all weights are up to date; not a collective call (Listing 1)."""
        for bucket in self._buckets:
            bucket.wait()

    def flush(self) -> None:
        """Has weights and buffers be those of synchronous training; buffers follow rank 0. A collective call."""
        self.synchronize()
        self._broadcast_buffers()
        self.flushed = True

    def resume(self) -> None:
        """Does nothing: flushed weights are those that training goes on from."""

    def metrics(self) -> dict[str, float]:
        """Returns the number of buckets, MiB sent and seconds of exposed communication."""
        return {"buckets": len(self._buckets), **super().metrics()}

    def optimizer_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Returns what ``optimizer.state_dict()`` would be without DeAR, on every rank; a collective call.

        The optimizer itself keeps no state while DeAR is attached: each rank has that of its shard. What is loaded into
        it with ``optimizer.load_state_dict``, on all ranks, is taken over.
        """
        self.synchronize()
        index = self._index(optimizer)
        optimizer = self.optimizers[index]
        before = dict(optimizer.state)
        if index not in self._loaded:  # otherwise the next step will take over what the optimizer has
            optimizer.state.update(self._buckets.optimizer_states(index))
        try:
            return optimizer.state_dict()
        finally:
            optimizer.state.clear()
            optimizer.state.update(before)

    def state_dict(self) -> dict[str, Any]:
        """Returns what travels together, and what the codec needs; see :meth:`optimizer_state_dict` for the rest."""
        self.synchronize()
        tuner = self._tuner.state_dict()
        return {"settings": self._shape_settings(), "tuner": tuner, **self._buckets.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank, weights and optimizers being loaded already.

        Raises:
            ValueError: the state is of other settings, or of another number of ranks.
        """
        if state["settings"] != self._shape_settings():
            raise ValueError(f"The state was saved with {state['settings']}, this run has {self._shape_settings()}.")
        if self._members != group_members(self.optimizers):
            self._take_over(self._agreed_parameters())
        self._buckets.load_state_dict(state)
        self._tuner.load_state_dict(state["tuner"])
        self._loaded.clear()

    def return_optimizer_states(self) -> None:
        """Gives the optimizers their whole state back, which :meth:`detach` would drop; a collective call."""
        self.synchronize()
        for index, optimizer in enumerate(self.optimizers):
            if index not in self._loaded:
                optimizer.state.update(self._buckets.optimizer_states(index))

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the thread and the process groups; the weights stay as they are."""
        for hook in self._hooks:
            hook.remove()
        for guard in self._guards:
            guard.release()
        self._tuner.close(timeout_s)
        self._queue.close(timeout_s)
        self._buckets.release()
        self.transport.close(timeout_s)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """FeedPipe: waits for the weights of this module."""
        self._order.runs(module)
        for bucket in self._buckets.needed_by(module):
            bucket.wait()

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        self._note_gradient(parameter)
        self._backpipe.gradient_is_ready(parameter, send=self.syncing)

    def _before_saving(self, *_: Any) -> None:
        """Has a state_dict hold the weights of the last step."""
        self.synchronize()

    def _after_loading(self, optimizer: Optimizer) -> None:
        """Has the next step begin with the state that was loaded, unless the first buckets are yet to take it."""
        if self._buckets:
            self._loaded.add(self._index(optimizer))

    def _take_over(self, parameters: Sequence[NamedParameter]) -> None:
        """Has all parameters that an optimizer has reduced and updated."""
        trained = [parameter for parameter in parameters if parameter.group]
        self._buckets.begin_anew(trained)
        self._tuner.begin(trained)
        self._members = group_members(self.optimizers)
        self._loaded.clear()
        for parameter in trained:
            if id(parameter.tensor) not in self._hooked:
                self._hooked.add(id(parameter.tensor))
                self._hooks.append(hook_gradient(parameter.tensor, self._gradient_is_ready))

    def _run(self, update: Callable[[], T], optimizer: Optimizer) -> tuple[bool, T]:
        """Runs ``update``; the ``optimizer.step()`` within it evaluates a closure and leaves the update to DeAR.

        Returns:
            Whether ``optimizer.step`` was called, and what ``update`` returned.
        """
        stepped = False

        def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
            nonlocal stepped
            result = None if closure is None else closure()
            stepped = True
            return result

        with replaced_step(optimizer, step):
            result = update()
        return stepped, result

    def _own_gradients(self, index: int) -> list[Tensor]:
        """Returns the shards of an optimizer's averaged gradient that this rank has."""
        return [bucket.own_gradient for bucket in self._buckets.of_optimizer(index)]

    def _make_transport(self, device: torch.device, backend: str | None) -> Transport:
        config = self.config
        return Transport(
            device,
            timeout_s=config.timeout_s,
            backend=backend,
            topology=config.topology,
            torus_columns=config.torus_columns,
        )

    def _shape_settings(self) -> dict[str, Any]:
        """The settings that decide what :meth:`state_dict` looks like."""
        sharded = [self.config.shards(optimizer) for optimizer in self.optimizers]
        return {
            "sharded": sharded,
            "compression": str(self.config.compression),
            "error_feedback": self.config.uses_error_feedback,
            "world_size": self.transport.world_size,
        }

    def _problem(self) -> ValueError | None:
        try:
            self._shape_settings()
            if self.config.tuning_file is not None and self.transport.rank == 0:
                self._tuning_file = TuningFile(self.config.tuning_file)
        except ValueError as error:
            return error
        for optimizer in self.optimizers:
            if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
                return ValueError(
                    f"{type(optimizer).__name__} wraps another optimizer, which DeAR would not reach: pass that one."
                )
        return None
