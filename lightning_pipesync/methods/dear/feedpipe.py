"""FeedPipe: all-gathers run until the next forward pass needs the weights (DeAR, Section III-B)."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_pipesync.core.comm_queue import CommQueue
from lightning_pipesync.methods.dear.algorithm import ExecutionOrder
from lightning_pipesync.methods.dear.fused_buckets import FusedBuckets
from lightning_pipesync.methods.module_hook import ModuleHook


class FeedPipe:
    """Starts the all-gathers of a step; each module waits for its own weights before its forward pass.

    Args:
        buckets: the fused parameters.
        order: observes in which order modules run.
        queue: runs the all-gathers.
    """

    def __init__(self, buckets: FusedBuckets, order: ExecutionOrder, queue: CommQueue) -> None:
        self._fused, self._order, self._queue = buckets, order, queue
        # Before the hooks of others, such as those of weight_norm, which read the weights.
        hook = ModuleHook(self._before_forward)
        self._hooks = [child.register_forward_pre_hook(hook, prepend=True) for child in order.modules]

    def start(self, optimizer: int) -> None:
        """Starts the all-gathers of the optimizer of index ``optimizer``."""
        for bucket in self._fused.of_optimizer(optimizer):
            bucket.all_gather(self._queue)
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
