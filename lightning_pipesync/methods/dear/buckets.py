"""All buckets of a model: made, planned, and made anew during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import (
    Fusion,
    num_bytes,
    plan_buckets,
)
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.link import measure_link
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.dear.bucket import FusedBucket
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.schedule import EarlyGathers, MeasuredStep
from lightning_pipesync.methods.gradients.backpipe import BackPipe
from lightning_pipesync.methods.gradients.bucket_update import gather_states, whole_states
from lightning_pipesync.methods.gradients.feedpipe import ExecutionOrder, FeedPipe
from lightning_pipesync.methods.gradients.low_rank import LowRankGradients, factor_bytes, low_rank_gradients

V = TypeVar("V")


class FusedBuckets:
    """The parameters, fused into buckets, in the order of their gradients; none before the first :meth:`fuse`."""

    def __init__(
        self,
        order: ExecutionOrder,
        optimizers: Sequence[Optimizer],
        config: DeARConfig,
        transport: Transport,
        backpipe: BackPipe,
        feedpipe: FeedPipe[FusedBucket],
    ) -> None:
        self._order, self._optimizers, self._config = order, optimizers, config
        self._transport, self._backpipe, self._feedpipe = transport, backpipe, feedpipe
        self._parameters: Sequence[NamedParameter] = ()
        self._low_rank: LowRankGradients | None = None
        self._ready: Sequence[NamedParameter] = ()  # in the order of their gradients
        self._needed: Sequence[NamedParameter] = ()  # in the order of the forward pass
        self.buckets: list[FusedBucket] = []
        self._measures = (config.gathers_early or config.chooses_fusion) and transport.world_size > 1
        self._early: EarlyGathers | None = None  # of these buckets; None until there are times to choose them by
        self._link: LinkCost | None = None  # measured once

    def of_optimizer(self, index: int) -> list[FusedBucket]:
        """Returns the buckets of an optimizer, in the order of their all-gathers."""
        return [bucket for bucket in self._feedpipe.buckets if bucket.group[0] == index]

    def reset(self, parameters: Sequence[NamedParameter]) -> None:
        """Releases the buckets; the next :meth:`fuse` makes buckets of ``parameters``, and measures new ones' times."""
        self.release()
        ids, known = ({id(parameter.tensor) for parameter in those} for those in (parameters, self._parameters))
        if self._measures and ids != known:
            self._order.times.begin()
        self._parameters = parameters
        self._low_rank = low_rank_gradients(parameters, self._config)

    def fuse(self, fusion: Fusion) -> None:
        """Fuses the parameters in the order that rank 0 has observed; a collective call."""
        index_of = {id(parameter.tensor): index for index, parameter in enumerate(self._parameters)}
        observed = [[index_of[k] for k in keys if k in index_of] for keys in (self._order.ready, self._order.needed)]
        ready, needed = self._transport.broadcast_object(observed)
        everything = range(len(self._parameters))
        ready += sorted(set(everything).difference(ready), reverse=True)  # those not observed come last
        needed += sorted(set(everything).difference(needed))
        self._ready = [self._parameters[index] for index in ready]
        self._needed = [self._parameters[index] for index in needed]
        self._set_buckets(plan_buckets(self._ready, fusion))

    def names(self, fusion: Fusion | None = None) -> tuple[tuple[str, ...], ...]:
        """Returns the names of the parameters in each bucket, of those with another fusion or of these."""
        layout = [bucket.members for bucket in self.buckets] if fusion is None else plan_buckets(self._ready, fusion)
        return tuple(tuple(member.name for member in members) for members in layout)

    def differs_from(self, fusion: Fusion) -> bool:
        return self.names(fusion) != self.names()

    def change_fusion(self, fusion: Fusion) -> None:
        """Makes other buckets of the parameters, whose optimizer states are at hand, with nothing in flight."""
        self.release()
        self._transport.release_memory()
        self._set_buckets(plan_buckets(self._ready, fusion))

    def optimizer_states(self, index: int) -> dict[Tensor, dict[str, Any]]:
        """Returns the state that an optimizer would have without DeAR; a collective call."""
        buckets = self.of_optimizer(index)
        slices = [_joined(b.updated_slices(rank) for b in buckets) for rank in range(self._transport.world_size)]
        states = gather_states(_joined(bucket.update.states() for bucket in buckets), slices, self._transport)
        return whole_states(states, chain.from_iterable(bucket.members for bucket in buckets))

    def drop_residuals(self, index: int | None = None) -> None:
        """Forgets what was not sent of an optimizer's gradients; None: of all, and of the movement of the weights."""
        for bucket in self.buckets if index is None else self.of_optimizer(index):
            bucket.drop_residuals()
            if index is None:
                bucket.drop_movement()

    @property
    def planned(self) -> bool:
        """Whether the all-gathers that start under backward are chosen for these buckets, or nothing is measured."""
        return not self._measures or self._early is not None

    @property
    def measured(self) -> bool:
        """Whether there are times by which these buckets can be planned, and they are not."""
        return bool(self.buckets) and not self.planned and not self._order.times.measuring

    @property
    def num_early(self) -> int:
        """Number of all-gathers that start under backward."""
        return 0 if self._early is None else sum(map(len, self._early.after))

    def candidates(self) -> list[Fusion]:
        """Returns sizes with short simulated steps, the same on all ranks; a collective call.

        Nothing may be in flight, here and in :meth:`plan_early_gathers`.
        """
        step = self._measured_step()
        return self._transport.broadcast_object(step.candidates() if self._transport.rank == 0 else [])

    def plan_early_gathers(self) -> None:
        """Chooses the all-gathers that start under the next backward passes, the same on all ranks; collective."""
        step, chosen = self._measured_step(), None
        if self._transport.rank == 0:
            chosen = step.early_gathers(step.buckets([bucket.members for bucket in self.buckets]))
        self._early = self._transport.broadcast_object(chosen)

    def gather_early_after(self, index: int, queue: CommQueue) -> None:
        """Queues the all-gathers that follow the reduce-scatter of the bucket ``index``."""
        if self._early is not None:
            for other in self._early.after[index]:
                self.buckets[other].gather_early(queue, self._early.pieces[other])

    def _measured_step(self) -> MeasuredStep:
        """Returns what the first steps have taken; measures the network once: a collective call then."""
        world_size, times, config = self._transport.world_size, self._order.times, self._config
        if self._link is None:
            self._link = measure_link(self._transport, config.compression)
        link = self._link

        def halves(members: Sequence[NamedParameter]) -> tuple[float, float]:
            if config.low_rank is not None:  # a whole all-reduce of factors under backward
                size = sum(factor_bytes(m.tensor.shape, m.tensor.element_size(), config.low_rank) for m in members)
                return link.all_reduce(size, world_size), 0.0
            half = link.reduce_scatter(sum(map(num_bytes, members)), world_size)
            return half, half

        latency, early = link.all_gather(0, world_size), config.gathers_early
        divisible = self._transport.gathers_parts
        return MeasuredStep(self._ready, times.ready, times.needed, halves, latency, early, divisible)

    def find_present(self) -> None:
        """Finds the parameters that have a gradient on some rank; the others are not updated, as in DDP."""
        flags = [present for bucket in self.buckets for present in bucket.present]
        somewhere = iter(self._transport.union(flags).wait())
        for bucket in self.buckets:
            bucket.present = [next(somewhere) for _ in bucket.present]

    def release(self) -> None:
        """Releases the buckets, and moves all parameters out of them."""
        for bucket in self.buckets:
            bucket.release()
        self._set_buckets([])

    def state_dict(self) -> dict[str, Any]:
        """Returns the parameters of each bucket, the observed orders, and this rank's state of each bucket."""
        return {
            "ready": [parameter.name for parameter in self._ready],
            "needed": [parameter.name for parameter in self._needed],
            "plan": [list(names) for names in self.names()],
            "buckets": [bucket.state_dict() for bucket in self.buckets],
            **({} if self._low_rank is None else {"low_rank": self._low_rank.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned; of other parameters, the next step makes buckets anew."""
        self.reset(self._parameters)
        by_name = {parameter.name: parameter for parameter in self._parameters}
        if set(state["ready"]) != by_name.keys():
            return
        self._ready, self._needed = ([by_name[name] for name in state[order]] for order in ("ready", "needed"))
        self._set_buckets([[by_name[name] for name in names] for names in state["plan"]])
        for bucket, saved in zip(self.buckets, state["buckets"], strict=True):
            bucket.load_state_dict(saved)
        if self._low_rank is not None:
            self._low_rank.load_state_dict(state["low_rank"])

    def _set_buckets(self, layout: Sequence[Sequence[NamedParameter]]) -> None:
        self.buckets = [
            FusedBucket(members, self._optimizers, self._config, self._transport, number, self._low_rank)
            for number, members in enumerate(layout)
        ]
        self._early, self._backpipe.buckets = None, self.buckets
        self._backpipe.index_of = {id(member.tensor): i for i, members in enumerate(layout) for member in members}
        self._feedpipe.set_buckets(self.buckets, [parameter.tensor for parameter in self._needed])


def _joined(mappings: Iterable[Mapping[str, V]]) -> dict[str, V]:
    return {key: value for mapping in mappings for key, value in mapping.items()}
