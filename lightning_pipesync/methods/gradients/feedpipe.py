"""FeedPipe: weights arrive under the next forward pass, each until a module needs it (DeAR, Section III-B).

All-gathers run so, and averages of replicas.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.marks import Version, versions_of, written_since
from lightning_pipesync.core.parameters import parameters_needed_by
from lightning_pipesync.methods.gradients.execution_order import ExecutionOrder
from lightning_pipesync.methods.module_hook import ModuleHook

K = TypeVar("K", bound=Hashable)


class GatheredBucket(Protocol):
    """Parameters that one collective brings up to date."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters."""

    def start_update(self, queue: CommQueue) -> None:
        """Starts to bring the weights up to date."""

    def wait(self) -> None:
        """Blocks until the weights are up to date; raises a RuntimeError if a peer is lost."""

    def arrives(self, timeout_s: float) -> bool:
        """Returns whether the weights are up to date after ``timeout_s`` seconds at most."""


B = TypeVar("B", bound=GatheredBucket)


class UnwrittenWeights:
    """Weights to which nobody may write while their update is under way.

    Args:
        own_writes: how often the update itself writes to each, see :func:`written_since`.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str], own_writes: int = 0) -> None:
        self._tensors, self._names, self._own_writes = tensors, names, own_writes
        self._versions: list[Version] = []  # while an update that nobody has waited for is under way

    def begin_update(self) -> None:
        self._versions = versions_of(self._tensors)

    def forget_update(self) -> None:
        """Checks nothing until the next update."""
        self._versions = []

    def end_update(self) -> None:
        """Raises a RuntimeError, once, if somebody has written to the weights since :meth:`begin_update`."""
        versions, self._versions = self._versions, []
        if written := written_since(versions, self._tensors, self._own_writes):
            raise RuntimeError(
                f"{self._names[written[0]]} was written to while its update of the last step was under way, "
                "which has lost the one or the other. Call synchronize() before you write to weights, or read them, "
                "other than in a forward pass: sync.synchronize(), trainer.strategy.method.synchronize(), "
                "fabric.strategy.method_of(optimizer).synchronize() or accelerator.synchronize(); or set "
                "overlap='none'."
            )


class FeedPipeSchedule(Generic[K]):
    """In which ``order`` the all-gathers start, that of the forward pass, and which of them a module waits for."""

    def __init__(self, buckets: Sequence[Sequence[K]], needed: Sequence[K]) -> None:
        position = {parameter: index for index, parameter in enumerate(needed)}
        self.order = sorted(range(len(buckets)), key=lambda bucket: min(position[p] for p in buckets[bucket]))
        self._bucket_of = {parameter: index for index, members in enumerate(buckets) for parameter in members}

    def awaited(self, parameters: Sequence[K]) -> list[int]:
        """Returns the buckets that a module with these parameters waits for before its forward pass."""
        return list(dict.fromkeys(self._bucket_of[p] for p in parameters if p in self._bucket_of))


class FeedPipe(Generic[B]):
    """Starts the updates of a step; each module waits for its own weights before its forward pass.

    A ``state_dict`` of the module, and what is about to replace its weights, waits for all.
    """

    def __init__(self, module: nn.Module, order: ExecutionOrder, queue: CommQueue) -> None:
        self._order, self._queue = order, queue
        self.buckets: list[B] = []  # in the order of their updates, that of the forward pass
        self._bucket_of: dict[int, B] = {}  # by the id of a parameter
        self._awaited: dict[nn.Module, list[B]] = {}
        # Before the hooks of others, such as those of weight_norm, which read the weights.
        before_forward, before_state = ModuleHook(self._before_forward), ModuleHook(self._before_state_dict)
        self._hooks = [child.register_forward_pre_hook(before_forward, prepend=True) for child in order.modules]
        self._hooks += [child.register_state_dict_pre_hook(before_state) for child in module.modules()]
        self._hooks += [child.register_load_state_dict_pre_hook(before_state) for child in module.modules()]

    def set_buckets(self, buckets: Sequence[B], needed: Sequence[Tensor]) -> None:
        """Sets the buckets; ``needed`` are their parameters, in the order in which the forward pass needs them."""
        members = [[id(parameter) for parameter in bucket.parameters] for bucket in buckets]
        schedule = FeedPipeSchedule(members, [id(parameter) for parameter in needed])
        self.buckets = [buckets[index] for index in schedule.order]
        self._bucket_of = {key: bucket for bucket, keys in zip(buckets, members, strict=True) for key in keys}
        self._awaited = {
            module: [buckets[i] for i in schedule.awaited([id(p) for p in parameters_needed_by(module)])]
            for module in self._order.modules
        }

    def start(self, buckets: Iterable[B]) -> None:
        """Starts the updates of ``buckets``, in the order in which the forward pass needs them."""
        for bucket in buckets:
            bucket.start_update(self._queue)
        self._queue.start_finishing()

    def end_step(self) -> None:
        """Blocks until the weights are up to date that may be read where no module's forward pass waits for them."""
        self._order.begin_step()
        for parameter in self._order.used_elsewhere:
            if (bucket := self._bucket_of.get(id(parameter))) is not None:
                bucket.wait()

    def wait(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def give_up(self, timeout_s: float) -> int:
        """Never waits again; returns in how many buckets weights do not arrive within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        arrive = [bucket.arrives(max(0.0, deadline - time.monotonic())) for bucket in self.buckets]
        self.remove_hooks()
        self.buckets, self._awaited, self._bucket_of = [], {}, {}
        return arrive.count(False)

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        began = self._order.times.now() if self._order.forward_begins(module) else None
        for bucket in self._awaited.get(module, ()):
            bucket.wait()
        self._order.times.module_has_waited(module, began)

    def _before_state_dict(self, *_: Any) -> None:
        self.wait()
