"""FeedPipe: weights arrive under the next forward pass, each until a module needs it (DeAR, Section III-B).

DeAR's all-gathers run so, and SelSync's averages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.methods.gradients.execution_order import ExecutionOrder
from lightning_pipesync.methods.gradients.module_hook import ModuleHook

K = TypeVar("K", bound=Hashable)


class GatheredBucket(Protocol):
    """Parameters that one collective brings up to date."""

    def start_update(self, queue: CommQueue) -> None:
        """Starts to bring the weights up to date."""

    def wait(self) -> None:
        """Blocks until the weights are up to date.

        Raises:
            RuntimeError: a peer is lost.
        """


class GatheredBuckets(Protocol):
    """All buckets of a model; both properties change when it is fused anew."""

    @property
    def buckets(self) -> Sequence[GatheredBucket]:
        """The buckets."""

    @property
    def awaited(self) -> Mapping[nn.Module, Sequence[GatheredBucket]]:
        """The buckets that a module's forward pass waits for."""

    def with_parameter(self, parameter: Tensor) -> GatheredBucket | None:
        """Returns the bucket of a parameter; None if there is none."""


class FeedPipeSchedule(Generic[K]):
    """In which order the all-gathers start, and which of them a module waits for.

    Args:
        buckets: the parameters of each bucket.
        needed: all parameters, in the order in which the forward pass needs them.

    Attributes:
        order: the buckets in the order of their all-gathers: the one that the forward pass needs first comes first.
    """

    def __init__(self, buckets: Sequence[Sequence[K]], needed: Sequence[K]) -> None:
        position = {parameter: index for index, parameter in enumerate(needed)}
        self.order = sorted(range(len(buckets)), key=lambda bucket: min(position[p] for p in buckets[bucket]))
        self._bucket_of = {parameter: index for index, members in enumerate(buckets) for parameter in members}

    def awaited(self, parameters: Sequence[K]) -> list[int]:
        """Returns the buckets that a module with these parameters waits for before its forward pass."""
        return list(dict.fromkeys(self._bucket_of[p] for p in parameters if p in self._bucket_of))


class FeedPipe:
    """Starts the updates of a step; each module waits for its own weights before its forward pass.

    Args:
        buckets: the fused parameters.
        order: observes in which order modules run.
        queue: runs the collectives.
    """

    def __init__(self, buckets: GatheredBuckets, order: ExecutionOrder, queue: CommQueue) -> None:
        self._fused, self._order, self._queue = buckets, order, queue
        # Before the hooks of others, such as those of weight_norm, which read the weights.
        hook = ModuleHook(self._before_forward)
        self._hooks = [child.register_forward_pre_hook(hook, prepend=True) for child in order.modules]

    def start(self, buckets: Iterable[GatheredBucket]) -> None:
        """Starts the updates of ``buckets``, in the order in which the forward pass needs them."""
        for bucket in buckets:
            bucket.start_update(self._queue)
        self._queue.flush()

    def end_step(self) -> None:
        """Blocks until the weights are up to date that may be read where no module's forward pass waits for them."""
        self._order.begin_step()
        for parameter in self._order.used_elsewhere:
            if (bucket := self._fused.with_parameter(parameter)) is not None:
                bucket.wait()

    def wait(self) -> None:
        """Blocks until all weights are up to date."""
        for bucket in self._fused.buckets:
            bucket.wait()

    def remove_hooks(self) -> None:
        """Removes all forward hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        began = self._order.times.now() if self._order.forward_begins(module) else None
        for bucket in self._fused.awaited.get(module, ()):
            bucket.wait()
        self._order.times.module_has_waited(module, began)
