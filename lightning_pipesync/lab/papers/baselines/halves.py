"""Half of DeAR's all-reduce: all-gathers under forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_pipesync.core.buckets import Bucket, Fusion, plan_buckets
from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.papers.baselines.over_transport import OverTransport


class AllGatherOnly(OverTransport):
    """DeAR without its reduce-scatters (DeAR, Fig. 8): it shows what of them is hidden, and does not train.

    Args:
        model: the model.
        bucket_mb: the most MiB of an all-gather.
    """

    def __init__(self, model: BenchModel, bucket_mb: float) -> None:
        super().__init__(f"all-gather only, {bucket_mb:g} MiB", model, "all_gather_only")
        self._queue = CommQueue("pipesync-baseline", self.transport.device, self.transport.traffic)
        plan = plan_buckets(self.in_ready_order[::-1], Fusion(bucket_mb=bucket_mb))
        self._buckets = [Bucket([parameter.tensor for parameter in group]) for group in plan]
        index_of = {id(parameter.tensor): index for index, group in enumerate(plan) for parameter in group}
        self._gathers: list[Queued[Tensor]] = []
        self._hooks = [
            child.register_forward_pre_hook(self._waiting_for({index_of[id(p)] for p in child.parameters(False)}))
            for child in modules_with_parameters(model.module)
        ]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._gathers = [
            self._queue.submit("all_gather", partial(self.transport.all_gather, bucket.flat))
            for bucket in self._buckets
        ]
        self._queue.flush()
        self.backward()
        self.optimizer.step()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._queue.close(10.0)
        super().close()

    def _waiting_for(self, buckets: set[int]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, args: Any) -> None:
            for index in sorted(buckets):
                self._gathers[index].wait()

        return wait
