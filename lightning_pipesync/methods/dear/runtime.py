"""DeAR in a training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.agreement import agreed_parameters, raise_on_all_ranks
from lightning_pipesync.core.buckets import MIB, buffer_reader, plan_buckets
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.exchange import exchange_fused
from lightning_pipesync.core.parameters import NamedParameter, hook_gradient, optimizer_of
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.bucket import FusedBucket
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.order import ExecutionOrder
from lightning_pipesync.methods.dear.pipeline import Pipeline
from lightning_pipesync.methods.dear.update import ELEMENTWISE, can_be_sharded
from lightning_pipesync.methods.method import SyncMethod, device_of, one_config

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
        sync.synchronize()                              # before anything but a forward pass reads the weights
        validate(model)
        sync.detach()

    ``p.grad`` stays this rank's own gradient; the average of all is never put together on one rank. With several
    backward passes before a step, all but the last belong under :meth:`no_sync`.

    Args:
        module: the model, the same on all ranks.
        optimizer: one or several torch optimizers over its parameters.
        config: the settings; or give them as keywords, see :class:`DeARConfig`.
        backend: of the traffic, see :class:`Transport`.

    Attributes:
        config: the settings.
        transport: the way to the other ranks.
        exposed_seconds: how long training has waited for communication.

    Raises:
        ValueError: the ranks differ in settings or model, or the model or optimizer is one that cannot be trained so.
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: DeARConfig | None = None,
        *,
        backend: str | None = None,
        **settings: Any,
    ) -> None:
        self.config = one_config(DeARConfig, config, settings)
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.transport = Transport(device_of(module), timeout_s=self.config.timeout_s, backend=backend)
        try:
            parameters = agreed_parameters(self.transport, self.config, module, self._optimizers)
            raise_on_all_ranks(self.transport, self._problem())
        except ValueError:
            self.transport.close()
            raise
        everything = [parameter.tensor for parameter in parameters]
        exchange_fused(everything, self.config.buffer_mb, self.transport.broadcast)
        self._read_buffers = buffer_reader(module)
        exchange_fused(self._read_buffers(), self.config.buffer_mb, self.transport.broadcast)
        self._parameters = [parameter for parameter in parameters if parameter.group]
        self._order = ExecutionOrder(self._parameters, module)
        self._pipeline = Pipeline(self.transport)
        self._buckets: list[FusedBucket] = []  # in the order in which gradients become ready; after the first step
        self._feeding_order: list[FusedBucket] = []
        self._bucket_of: dict[int, FusedBucket] = {}
        self._buckets_of: dict[nn.Module, list[FusedBucket]] = {}
        self._num_launched = 0
        self._reducing = self._reduced = False
        self._stepped: set[int] = set()  # optimizers that have used the gradients of this round
        self._syncing = True
        self.exposed_seconds = 0.0
        self._hooks = [child.register_forward_pre_hook(self._before_forward) for child in self._order.parameters_of]
        for index, parameter in enumerate(self._parameters):
            self._hooks.append(hook_gradient(parameter.tensor, partial(self._gradient_is_ready, index)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes add to this rank's gradients and communicate nothing."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def after_backward(self, optimizer: Optimizer | None = None) -> bool:
        """Waits until the gradients of all ranks are averaged, each rank its shard of them.

        Raises:
            RuntimeError: a peer is lost.
        """
        if self._reduced and self._index(optimizer) not in self._stepped:
            return False
        if not self._buckets:
            self._plan()
        if not self._reducing:
            self._begin_round()
        self._launch(len(self._buckets))
        with self._exposed():
            if self._pipeline.finish_reducing(not all(all(bucket.present) for bucket in self._buckets)):
                self._find_present()
        self._reducing, self._reduced = False, True
        return False

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clips the averaged gradient by its L2 norm, to which each rank contributes one number, that of its shard."""
        self.after_backward(optimizer)
        gradients = [bucket.own_gradient for bucket in self._buckets_of_optimizer(optimizer)]
        squares = torch.stack([torch.linalg.vector_norm(flat, dtype=torch.float32).square() for flat in gradients])
        with self._exposed():
            norm = self.transport.all_reduce(squares.sum().reshape(1)).wait().sqrt()[0]
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for flat in gradients:
            flat.mul_(factor)
        return norm

    def step(self, update: Callable[[], T] | None = None, optimizer: Optimizer | None = None) -> T | None:
        """Starts to bring the weights up to date; they are when a forward pass, or :meth:`synchronize`, needs them.

        Raises:
            RuntimeError: a peer is lost.
        """
        index, stepped, result = self._index(optimizer), True, None
        if update is not None:
            stepped, result = self._run(update, self._optimizers[index])
        self.after_backward(optimizer)
        if stepped:  # otherwise a loss scaler skips the step
            buckets = self._buckets_of_optimizer(optimizer)
            for bucket in buckets:
                bucket.update.keep_hyperparameters()
            self._pipeline.feed(buckets)
        self._stepped.add(index)
        self._order.begin_step()
        with self._exposed():
            for used in self._order.used_elsewhere:
                self._pipeline.wait_for(self._bucket_of[used])
        return result

    def synchronize(self) -> None:
        """Waits until all weights are up to date; not a collective call (Listing 1)."""
        with self._exposed():
            for bucket in self._buckets:
                self._pipeline.wait_for(bucket)

    def flush(self) -> None:
        """Has weights and buffers be those of synchronous training; buffers follow rank 0. A collective call."""
        self.synchronize()
        exchange_fused(self._read_buffers(), self.config.buffer_mb, self.transport.broadcast)

    def resume(self) -> None:
        """Does nothing: flushed weights are those that training goes on from."""

    @property
    def flushed(self) -> bool:  # type: ignore[override]
        """Whether all weights are up to date."""
        return all(bucket.arrived.is_set() for bucket in self._buckets)

    def metrics(self) -> dict[str, float]:
        """Returns the number of buckets, MiB sent and seconds of exposed communication."""
        return {
            "buckets": len(self._buckets),
            "mib_sent": self.transport.traffic.total_bytes_sent / MIB,
            "exposed_seconds": self.exposed_seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's shards of the optimizer's state, the codec's residuals, and what travels in one piece."""
        self.synchronize()
        index_of = {id(parameter.tensor): index for index, parameter in enumerate(self._parameters)}
        return {
            "settings": self._shape_settings(),
            "plan": [[index_of[id(member.tensor)] for member in bucket.members] for bucket in self._buckets],
            "feeding_order": [self._buckets.index(bucket) for bucket in self._feeding_order],
            "buckets": [bucket.state_dict() for bucket in self._buckets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank, the weights being loaded already.

        Raises:
            ValueError: the state is of other settings, or of another number of ranks.
        """
        if state["settings"] != self._shape_settings():
            raise ValueError(f"The state was saved with {state['settings']}, this run has {self._shape_settings()}.")
        self._release()
        self._fuse([[self._parameters[index] for index in bucket] for bucket in state["plan"]], state["feeding_order"])
        for bucket, saved in zip(self._buckets, state["buckets"], strict=True):
            bucket.load_state_dict(saved)

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the thread and the process groups; the weights stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._pipeline.close(timeout_s)
        self._release()
        self.transport.close(timeout_s)

    # --- the backward pass ------------------------------------------------------------------------------------------

    def _gradient_is_ready(self, index: int, _: Tensor) -> None:
        """BackPipe: starts the reduce-scatter of the bucket whose last gradient this is."""
        if not self._syncing:
            self._reduced = False
            return
        self._order.is_ready(index)
        if not self._buckets:  # the first step only watches
            return
        bucket = self._bucket_of[index]
        if self._reducing and bucket.launched:  # a further backward pass before the step: what it adds is reduced anew
            self._launch(len(self._buckets))
            self._reducing = False
        if not self._reducing:
            self._begin_round()
        bucket.num_awaited -= 1
        end = self._num_launched
        while end < len(self._buckets) and self._buckets[end].num_awaited <= 0:
            end += 1
        self._launch(end)

    def _begin_round(self) -> None:
        """Gets all buckets ready for the gradients of a backward pass."""
        with self._exposed():
            self._pipeline.drain()
            for bucket in self._buckets:
                self._pipeline.wait_for(bucket)
        for bucket in self._buckets:
            bucket.expect_gradients()
        self._stepped.clear()
        self._num_launched, self._reducing, self._reduced = 0, True, False

    def _launch(self, end: int) -> None:
        """Starts the reduce-scatters of the buckets up to ``end``."""
        for bucket in self._buckets[self._num_launched : end]:
            bucket.take_gradients()
            self._pipeline.reduce(bucket)
        self._num_launched = max(end, self._num_launched)

    def _find_present(self) -> None:
        """Finds out which parameters have a gradient on some rank; the others are not updated, as in DDP."""
        flags = [present for bucket in self._buckets for present in bucket.present]
        somewhere = iter(self.transport.union(flags).wait())
        for bucket in self._buckets:
            bucket.present = [next(somewhere) for _ in bucket.present]

    # --- the forward pass -------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """FeedPipe: waits for the weights of this module."""
        self._order.runs(module)
        for bucket in self._buckets_of.get(module, ()):
            if not bucket.arrived.is_set():
                with self._exposed():
                    self._pipeline.wait_for(bucket)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Fuses the parameters, in the order that the first backward pass has shown; a collective call."""
        ready, position = self._order.agree(self.transport)
        plan = plan_buckets(ready, self.config.plan())
        first_needed = [min(position[id(member.tensor)] for member in members) for members in plan]
        self._fuse(plan, sorted(range(len(plan)), key=first_needed.__getitem__))

    def _fuse(self, plan: Sequence[Sequence[NamedParameter]], feeding_order: Sequence[int]) -> None:
        """Makes the buckets."""
        codec = get_codec(self.config.compression)
        for members in plan:
            optimizer = self._optimizers[optimizer_of(members)]
            self._buckets.append(FusedBucket(members, optimizer, codec, self._sharded(optimizer), self.transport))
        self._feeding_order = [self._buckets[index] for index in feeding_order]
        bucket_of = {id(member.tensor): bucket for bucket in self._buckets for member in bucket.members}
        self._bucket_of = {i: bucket_of[id(parameter.tensor)] for i, parameter in enumerate(self._parameters)}
        for module, indices in self._order.parameters_of.items():
            self._buckets_of[module] = list(dict.fromkeys(self._bucket_of[index] for index in indices))

    def _release(self) -> None:
        for bucket in self._buckets:
            bucket.release()
        self._buckets = []

    def _shape_settings(self) -> dict[str, Any]:
        """The settings that decide what :meth:`state_dict` looks like."""
        sharded = [self._sharded(optimizer) for optimizer in self._optimizers]
        shared = {"compression": str(self.config.compression), "world_size": self.transport.world_size}
        return {"sharded": sharded, **shared}

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

        own = vars(optimizer).get("step")
        optimizer.step = step  # type: ignore[method-assign]
        try:
            result = update()
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own  # type: ignore[method-assign]
        return stepped, result

    def _buckets_of_optimizer(self, optimizer: Optimizer | None) -> list[FusedBucket]:
        """Returns its buckets in the order in which the forward pass needs them."""
        index = self._index(optimizer)
        return [bucket for bucket in self._feeding_order if optimizer_of(bucket.members) == index]

    def _index(self, optimizer: Optimizer | None) -> int:
        if optimizer is None and len(self._optimizers) > 1:
            raise ValueError(f"There are {len(self._optimizers)} optimizers: say whose step it is with optimizer=.")
        for index, known in enumerate(self._optimizers):
            if optimizer is None or known is optimizer:
                return index
        raise ValueError(f"{type(optimizer).__name__} is not an optimizer that was given to DeAR.")

    def _sharded(self, optimizer: Optimizer) -> bool:
        if self.config.update is None:
            return can_be_sharded(optimizer, self.config.elementwise)
        return self.config.update == "sharded"

    def _problem(self) -> ValueError | None:
        for optimizer in self._optimizers:
            if self._sharded(optimizer) and not can_be_sharded(optimizer, self.config.elementwise):
                known = ", ".join(known.__name__ for known in ELEMENTWISE)
                return ValueError(
                    f"update='sharded' divides tensors among the ranks, and {type(optimizer).__name__} is not known to "
                    f"treat every value by itself, as {known} do: use update='replicated', or name its class in "
                    "elementwise= if it does."
                )
        return None

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.exposed_seconds += time.perf_counter() - start
