"""All-gathers that start under backward, while no reduce-scatter is ready.

In the paper no all-gather starts before the last reduce-scatter has ended: a step takes ``max(t_ff, t_ag) + max(t_bp,
t_rs)`` (DeAR, Eq. 7). Where reduce-scatters take less time than backward, the network idles under backward, and forward
may wait for all-gathers that could have run then. An averaged gradient can be gathered as soon as it is reduced; what
is not gathered by the end of backward is gathered under the next forward.

[Note: one schedule on all ranks]
Whether a reduce-scatter is ready differs from rank to rank and from step to step, and all ranks must issue the same
operations in the same order. So rank 0 decides in advance, from the times of its first steps and the cost of the
network, which all-gathers follow which reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import torch

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.schedule import BucketTimes, simulate_step
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.bucket import FusedBucket
from lightning_pipesync.methods.dear.fused_buckets import FusedBuckets
from lightning_pipesync.methods.execution_order import ExecutionOrder

#: Candidates: the least share of an all-gather that runs before the next reduce-scatter is ready.
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)

#: The least gain, as a share of a step, for which all-gathers start early.
LEAST_GAIN = 0.005

#: How many times as slow as measured the network may be: a schedule that serves one of them only would often lose.
NETWORKS = (0.8, 1.0, 1.25)

#: Sizes in bytes and repetitions of the all-gathers that measure the network.
SIZES, ROUNDS = (2**17, 2**20), 4


def plan_early_gathers(buckets: Sequence[BucketTimes]) -> list[list[int]]:
    """Returns for each bucket those whose all-gathers follow its reduce-scatter.

    Of the candidates that make no simulated step longer, whichever of ``NETWORKS`` it is on, the one that gains most on
    average.

    Args:
        buckets: in the order of their reduce-scatters.
    """
    best: list[list[int]] = [[] for _ in buckets]
    without, largest = _simulated_seconds(buckets, best), LEAST_GAIN
    for share in SHARES:
        early = gathers_in_gaps(buckets, share)
        gains = [1 - t / before for t, before in zip(_simulated_seconds(buckets, early), without, strict=True)]
        if min(gains) >= 0 and mean(gains) > largest:
            best, largest = early, mean(gains)
    return best


def _simulated_seconds(buckets: Sequence[BucketTimes], early: Sequence[Sequence[int]]) -> list[float]:
    """Returns the seconds of a simulated step on each of ``NETWORKS``."""
    backward, forward = max(b.ready for b in buckets), max(b.needed for b in buckets)
    return [simulate_step([b.on(network) for b in buckets], forward, backward, early).seconds for network in NETWORKS]


def gathers_in_gaps(buckets: Sequence[BucketTimes], share: float) -> list[list[int]]:
    """Returns for each bucket those whose all-gathers follow its reduce-scatter.

    When no reduce-scatter is ready, the reduced bucket is gathered that forward needs first, if at least ``share`` of
    its all-gather runs before the next reduce-scatter is ready.
    """
    early: list[list[int]] = [[] for _ in buckets]
    reduced: list[int] = []
    free = 0.0  # when the network is
    for index, bucket in enumerate(buckets[:-1]):
        free = max(free, bucket.ready) + bucket.reduce_scatter
        reduced.append(index)
        next_is_ready = buckets[index + 1].ready
        while reduced and free < next_is_ready:
            first = min(reduced, key=lambda other: buckets[other].needed)
            if next_is_ready - free < share * buckets[first].all_gather:
                break
            free += buckets[first].all_gather
            early[index].append(first)
            reduced.remove(first)
    return early


class EagerGathers:
    """The schedule of early all-gathers, made when there are times, and again when the buckets change.

    Args:
        buckets: the fused parameters.
        order: has the times of the first steps.
        transport: the way to the other ranks.
        enabled: whether all-gathers may start early.
    """

    def __init__(self, buckets: FusedBuckets, order: ExecutionOrder, transport: Transport, enabled: bool) -> None:
        self._fused, self._times, self._transport = buckets, order.times, transport
        self._enabled = enabled and transport.world_size > 1
        self._trained: set[int] = set()  # ids of the parameters whose times are measured
        self._version = -1  # of the buckets of the schedule; there is none
        self._after: list[list[int]] = []

    @property
    def due(self) -> bool:
        """Whether a schedule can be made that does not exist yet; the same on all ranks."""
        return bool(self._fused.buckets) and not self.final and not self._times.measuring

    @property
    def final(self) -> bool:
        """Whether there is a schedule for the present buckets, or none is to be made."""
        return not self._enabled or self._is_current

    def begin(self, parameters: Sequence[NamedParameter]) -> None:
        """Measures the times of the trained parameters, unless they are the same as before."""
        trained = {id(parameter.tensor) for parameter in parameters}
        if self._enabled and trained != self._trained:
            self._trained = trained
            self._times.begin()

    def after(self, index: int) -> Sequence[FusedBucket]:
        """Returns the buckets whose all-gathers follow the reduce-scatter of the bucket ``index``."""
        return [self._fused.buckets[other] for other in self._after[index]] if self._is_current else []

    @property
    def num_early(self) -> int:
        """Number of all-gathers that start under backward."""
        return sum(map(len, self._after)) if self._is_current else 0

    def plan(self) -> None:
        """Makes the schedule that all ranks follow from the next backward pass on; a collective call.

        No operation may be in flight.
        """
        link = measure_link(self._transport)
        after = plan_early_gathers(self._bucket_times(link)) if self._transport.rank == 0 else []
        self._after = self._transport.gather_objects(after)[0]
        self._version = self._fused.version

    @property
    def _is_current(self) -> bool:
        return self._version == self._fused.version

    def _bucket_times(self, link: LinkCost) -> list[BucketTimes]:
        """Returns the times of the buckets, since the first gradient of backward.

        A parameter that was not seen counts as ready at the end of backward, and as needed at the beginning of forward.
        """
        ready, needed = self._times.ready, self._times.needed
        end, world_size = max(ready.values(), default=0.0), self._transport.world_size
        return [
            BucketTimes(
                ready=max(ready.get(id(member.tensor), end) for member in bucket.members),
                needed=min(needed.get(id(member.tensor), 0.0) for member in bucket.members),
                reduce_scatter=link.reduce_scatter(bucket.gradients.flat.nbytes, world_size),
                all_gather=link.all_gather(bucket.gradients.flat.nbytes, world_size),
            )
            for bucket in self._fused.buckets
        ]


def measure_link(transport: Transport) -> LinkCost:
    """Returns the cost of the network, from a few all-gathers in a row; a collective call."""
    clock = Clock(transport.device)
    flats = {size: torch.zeros(size // 4, dtype=torch.float32, device=transport.device) for size in SIZES}
    transport.all_gather(flats[max(SIZES)]).wait()  # all ranks begin, and a network that lets bursts pass has none left
    seconds = []
    for flat in flats.values():
        begin = clock.now()
        for handle in [transport.all_gather(flat) for _ in range(ROUNDS)]:
            handle.wait()
        seconds.append(clock.seconds_between(begin, clock.now()) / ROUNDS)
    return LinkCost.fit(list(flats), seconds, transport.world_size, halves=1)
