"""All-reduces of groups of tensors, after backward or under it: WFBP, MG-WFBP, and half an all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from benchmarks.baselines.over_transport import OverTransport
from lightning_pipesync.core.buckets import Bucket, Fusion, plan_buckets
from lightning_pipesync.core.comm.comm_queue import Queued
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.link import measure_link
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.methods.gradients.backpipe import BackPipe
from lightning_pipesync.methods.gradients.bucket import GradientBucket
from lightning_pipesync.methods.gradients.feedpipe import StepTimes


class GroupedAllReduce(OverTransport):
    """Averages the gradients of groups of tensors, each by one all-reduce of this package's transport.

    Args:
        name: the name in tables.
        model: the model that it trains.
        limit: the property of :class:`StepCost` that bounds its step.
        bucket_mb: the most MiB of a group; None: every tensor by itself.
        hidden: whether an all-reduce starts under backward, when the gradients of its group are ready.
    """

    _bucket_type: ClassVar[type[GradientBucket]] = GradientBucket

    def __init__(
        self, name: str, model: BenchModel, limit: str, bucket_mb: float | None, *, hidden: bool = True
    ) -> None:
        super().__init__(name, model, limit)
        self._ready_order = [parameter.tensor for parameter in self.in_ready_order]
        self._backpipe = BackPipe(self.queue, may_start=self._may_start)
        layout = plan_buckets(self.in_ready_order, Fusion(bucket_mb=bucket_mb))
        self._set_groups([[parameter.tensor for parameter in group] for group in layout])
        if hidden:
            self._backpipe.hook_gradients(self._ready_order)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self._backpipe.start_rest()
        self.queue.wait_all()
        for bucket in self._backpipe.buckets:
            bucket.unpack()
        self._backpipe.end_step()
        self.optimizer.step()

    def close(self) -> None:
        self._backpipe.remove_hooks()
        super().close()

    def _set_groups(self, groups: Sequence[list[Tensor]]) -> None:
        self._backpipe.buckets = [self._bucket_type(group, self.transport) for group in groups]
        self._backpipe.index_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group}

    def _may_start(self, parameter: Tensor) -> bool:
        return True


class MergedAllReduce(GroupedAllReduce):
    """MG-WFBP (Shi et al., INFOCOM 2019): WFBP that merges tensors where a message costs more than waiting."""

    def __init__(self, model: BenchModel) -> None:
        super().__init__("MG-WFBP", model, "baseline", bucket_mb=None)
        self._times = StepTimes(self.transport.device)

    def prepare(self) -> dict[str, Any] | None:
        self._times.begin()
        while self._times.measuring:
            self.step()
            self._times.end_step()
        moments = [self._times.ready[id(parameter)] for parameter in self._ready_order]
        num_bytes = [parameter.nbytes for parameter in self._ready_order]
        link = measure_link(self.transport)
        sizes = merged(moments, num_bytes, link, self.transport.world_size) if self.transport.rank == 0 else []
        tensors = iter(self._ready_order)
        self._set_groups([[next(tensors) for _ in range(size)] for size in self.transport.gather_objects(sizes)[0]])
        return None

    def _may_start(self, parameter: Tensor) -> bool:
        self._times.gradient_is_ready(parameter)
        return True


class ReduceScatterBucket(GradientBucket):
    """Gradients of which each rank gets the average of its shard only."""

    kind = "reduce_scatter"

    def start(self, piece: int = 0) -> Handle[Tensor]:
        return self._collectives.reduce_scatter(self.pieces[piece], mean=True)


class ReduceScatterOnly(GroupedAllReduce):
    """DeAR without its all-gathers (DeAR, Fig. 8): it shows what of them is hidden, and does not train."""

    _bucket_type = ReduceScatterBucket

    def __init__(self, model: BenchModel, bucket_mb: float) -> None:
        name = f"reduce-scatter only, {bucket_mb:g} MiB"
        super().__init__(name, model, "reduce_scatter_only", bucket_mb)


class AllGatherOnly(OverTransport):
    """DeAR without its reduce-scatters (DeAR, Fig. 8): it shows what of them is hidden, and does not train."""

    def __init__(self, model: BenchModel, bucket_mb: float) -> None:
        super().__init__(f"all-gather only, {bucket_mb:g} MiB", model, "all_gather_only")
        plan = plan_buckets(self.in_ready_order[::-1], Fusion(bucket_mb=bucket_mb))
        self._buckets = [Bucket([parameter.tensor for parameter in group]) for group in plan]
        index_of = {id(parameter.tensor): index for index, group in enumerate(plan) for parameter in group}
        self._gathers: list[Queued[Tensor]] = []
        self.hooks = [
            child.register_forward_pre_hook(self._waiting_for({index_of[id(p)] for p in child.parameters(False)}))
            for child in modules_with_parameters(model.module)
        ]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._gathers = [
            self.queue.submit("all_gather", partial(self.transport.all_gather, bucket.flat)) for bucket in self._buckets
        ]
        self.queue.start_finishing()
        self.backward()
        self.optimizer.step()

    def _waiting_for(self, buckets: set[int]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, args: Any) -> None:
            for index in sorted(buckets):
                self._gathers[index].wait()

        return wait


def merged(ready: Sequence[float], num_bytes: Sequence[int], link: LinkCost, world_size: int) -> list[int]:
    """Returns the number of tensors of each group (MG-WFBP, Algorithm 1).

    A group is merged with the next tensor if that is ready before the group's all-reduce would start, or no later than
    the startup time of an all-reduce after it: then one message less saves more than waiting costs.

    Args:
        ready: when each gradient is ready, in seconds, ascending.
        num_bytes: the size of each gradient.
        link: the cost of the network.
        world_size: number of ranks.
    """
    startup = link.all_reduce(0, world_size)
    sizes: list[int] = []
    count, filled, free = 0, 0, 0.0  # of the present group; when the network is
    for index, moment in enumerate(ready):
        count, filled = count + 1, filled + num_bytes[index]
        start = max(free, moment)
        if index + 1 < len(ready) and ready[index + 1] < start + startup:
            continue
        free = start + link.all_reduce(filled, world_size)
        sizes.append(count)
        count, filled = 0, 0
    return sizes
