"""Buckets of fused parameters: the two halves of their all-reduce, and their re-fusion during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import (
    Bucket,
    Fusion,
    num_bytes,
    plan_buckets,
    shard_numel,
    zeros_with_room,
)
from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.link import measure_link
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.dtensors import LocalShard
from lightning_pipesync.core.guarded_states import at_hand, send_away
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.schedule import EarlyGathers, MeasuredStep
from lightning_pipesync.methods.gradients.backpipe import BackPipe
from lightning_pipesync.methods.gradients.bucket import GradientBucket
from lightning_pipesync.methods.gradients.bucket_update import (
    BucketUpdate,
    Piece,
    gather_states,
    slices_in_shard,
    whole_states,
)
from lightning_pipesync.methods.gradients.feedpipe import ExecutionOrder, FeedPipe, UnwrittenWeights
from lightning_pipesync.methods.gradients.low_rank import (
    LowRankGradients,
    factor_bytes,
    low_rank_bucket,
    low_rank_gradients,
)

V = TypeVar("V")

#: Where the states of optimizers are, see :func:`send_away`.
IN_BUCKETS = "DeAR's buckets have"


class FusedBucket(GradientBucket):
    """Parameters of one group of one optimizer, which become views of one buffer, ``values``.

    Shards of FSDP2's stay where they are, and ``values`` is None; then ``gradients`` has memory only from its
    reduce-scatter until the update, so that it has none while FSDP2 has gathered most. If it is ``sharded``, this rank
    updates only its shard. ``gradient_shard`` is what the reduce-scatter averages. With ``low_rank`` whole all-reduces
    of factors take the place of the reduce-scatter, and nothing is left to be gathered.
    """

    kind = "reduce_scatter"

    def __init__(
        self,
        members: Sequence[NamedParameter],
        optimizers: Sequence[Optimizer],
        config: DeARConfig,
        transport: Transport,
        number: int,
        low_rank: LowRankGradients | None = None,
    ) -> None:
        tensors = [member.tensor for member in members]
        factorized = low_rank_bucket(low_rank, tensors, transport.world_size)
        super().__init__(tensors, transport, config.compression, number=number, low_rank=factorized)
        assert members[0].group is not None
        self.members, self.group = list(members), members[0].group
        optimizer, lossless = optimizers[self.group[0]], self._codec.lossless
        self._places = {member.name: place for member, place in zip(members, self.gradients.places, strict=True)}
        self.values: Bucket | None = None
        self.sharded = config.shards(optimizer)
        self._views = [parameter.detach() for parameter in self.parameters]
        if not isinstance(self.parameters[0], LocalShard):
            self.values = Bucket(self.parameters, transport.world_size)
            self.values.pack(self.parameters)
            self._views = self.values.views
            for tensor, view in zip(self.parameters, self._views, strict=True):
                tensor.data = view
        if config.uses_error_feedback:
            self.use_error_feedback(gathered=not self.sharded)
        [self._feedback] = self.feedback
        # A step on the whole buffer also updates the gaps between parameters, which a lossy codec must not see.
        values, gradient = None if self.values is None else self.values.flat, self.gradients.flat
        self.gradient_shard = transport.shard(gradient)
        self._difference: Tensor | None = None
        self._dropped: Tensor | None = None
        if self.sharded:
            assert values is not None
            self._shard = values = transport.shard(values)
            # Weights that a lossy codec rounds at every step would not move. So it encodes their difference to the
            # weights that all ranks have. With error feedback its error is added to the weights before the next update.
            if not lossless:
                flat = self.gradients.flat
                self._difference = zeros_with_room(flat.numel(), transport.world_size, flat.dtype, flat.device)
                values = self._shard.clone()
            if config.uses_error_feedback:
                self._dropped = torch.zeros_like(self._shard)
            self._updated, gradient = values, self.gradient_shard
        whole = (values, gradient) if values is not None and config.is_elementwise(optimizer) and lossless else ()
        self.update = BucketUpdate(optimizer, self.group[1], self._pieces(), *whole)
        with at_hand(optimizer) as states:
            for tensor in self.parameters:
                states.pop(tensor, None)
        send_away(optimizer, IN_BUCKETS)
        self._gathered: Queued[Tensor] | None = None
        self._unwritten = UnwrittenWeights(self.parameters, [member.name for member in self.members])
        self._num_early = 0  # values of each rank's shard that are gathered under backward

    @property
    def averaged(self) -> list[Tensor]:
        """What this rank has of the averaged gradient after backward: its shard, and what was gathered early."""
        if self._all_early:
            return [self.gradients.flat]
        early = self._collectives.parts(self.gradients.flat, slice(self._num_early))
        return [*early, self.gradient_shard[self._num_early :]]

    @torch.no_grad()
    def reduce(self, queue: CommQueue, requires: Queued[Any] | None = None) -> None:
        """Packs the gradients, zeros for missing ones, and queues their reduce-scatter (OP1)."""
        for tensor, view in zip(self.parameters, self._views, strict=True):
            if tensor.data_ptr() != view.data_ptr():  # the user has given the parameter other memory
                if self.values is None:
                    view.data = tensor.data
                    continue
                view.copy_(tensor)
                tensor.data = view
        self.gradients.take_memory()
        super().reduce(queue, requires)
        self.note_gradients()
        self._num_early = 0 if self._low_rank is None else self._largest_shard

    def start(self, piece: int = 0) -> Handle[Tensor]:
        if self._low_rank is not None:
            return super().start(piece)
        return self._collectives.reduce_scatter(
            self.gradients.flat, codec=self._codec, mean=True, feedback=self.residuals()
        )

    def gather_early(self, queue: CommQueue, pieces: int) -> None:
        """Starts the all-gather of the next of ``pieces`` equal pieces of each shard, unless the bucket is sharded."""
        begin, largest = self._num_early, self._largest_shard
        self._num_early = min(largest, begin + -(-largest // pieces))
        part = None if pieces == 1 else slice(begin, self._num_early)
        start = partial(self._gather_gradient, part)
        queue.submit("all_gather", start, requires=self._averaged[0], what=self.label)

    def start_update(self, queue: CommQueue) -> None:
        """Starts the update, with the current hyper-parameters, and the all-gather (OP2) unless it has run."""
        self.update.copy_hyperparameters()
        if self.values is not None:  # of shards, the update itself counts
            self._unwritten.begin_update()
        start = (lambda: Handle(lambda: self.gradients.flat)) if self._all_early else self._start_all_gather
        self._gathered = queue.submit("all_gather", start, lambda _: self._finish_all_gather(), what=self.label)

    def wait(self) -> None:
        """See the base class; raises a RuntimeError, too, if somebody has written to the weights without waiting."""
        if self._gathered is not None:
            self._gathered.wait()
            self._unwritten.end_update()
            if self.values is None:
                self._gathered = None  # the next gradients may be in the buffer when this is called again
                self.gradients.release_memory()

    def arrives(self, timeout_s: float) -> bool:
        if self._gathered is None:
            return True
        self._unwritten.forget_update()
        if arrived := self._gathered.succeeds(timeout_s):
            self.wait()
        return arrived

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of the codec; empty without error feedback."""
        state: dict[str, Any] = {}
        if self._dropped is not None:
            state["dropped"] = self._dropped
        if self._feedback is not None:
            state["feedback"] = self._feedback.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._dropped is not None:
            self._dropped.copy_(state["dropped"])
        if self._feedback is not None:
            self._feedback.load_state_dict(state["feedback"])

    def drop_movement(self) -> None:
        """Forgets what was not sent of the movement of this rank's weights: others were loaded."""
        if self._dropped is not None:
            self._dropped.zero_()

    def release(self) -> None:
        """Moves every parameter out of the buffer."""
        if self.values is not None:
            for tensor in self.parameters:
                tensor.data = tensor.data.clone()

    def updated_slices(self, rank: int) -> dict[str, slice]:
        """Returns the slices of the parameters, by name, that a rank updates: whole ones, or those in its shard."""
        if not self.sharded:
            return {member.name: slice(0, member.tensor.numel()) for member in self.members}
        shard = self._collectives.shard_slice(self.gradients.flat.numel(), rank)
        return slices_in_shard(shard, self._places)

    def _in_shard(self, shard: Tensor) -> dict[str, Tensor]:
        """Returns the views of each parameter, by name, of a tensor of the shape of this rank's shard."""
        begin = self._collectives.shard_slice(self.gradients.flat.numel(), self._collectives.rank).start
        views = {}
        for name, place in self.updated_slices(self._collectives.rank).items():
            start = self._places[name].start - begin
            views[name] = shard[start + place.start : start + place.stop]
        return views

    def _pieces(self) -> list[Piece]:
        if not self.sharded:
            rows = zip(self._places, self.parameters, self._views, self.gradients.views, strict=True)
            return [Piece(i, *row, None) for i, row in enumerate(rows)]
        slices = self.updated_slices(self._collectives.rank)
        values, gradients = self._in_shard(self._updated), self._in_shard(self.gradient_shard)
        return [
            Piece.in_shard(i, m.name, m.tensor, values[m.name], gradients[m.name], slices[m.name])
            for i, m in enumerate(self.members)
            if m.name in slices
        ]

    @torch.no_grad()
    def _start_all_gather(self) -> Handle[Tensor]:
        """Starts the all-gather: of the weights, after this rank has updated its shard, or of the gradients."""
        if not self.sharded:
            return self._gather_gradient(slice(self._num_early, None) if self._num_early else None)
        if self._difference is None:
            self._apply_update()
            assert self.values is not None
            return self._collectives.all_gather(self.values.flat, codec=self._codec)
        self._updated.copy_(self._shard)
        if self._dropped is not None:
            self._updated.add_(self._dropped)
        self._apply_update()
        torch.sub(self._updated, self._shard, out=self._collectives.shard(self._difference))
        return self._collectives.all_gather(self._difference, codec=self._codec)

    def _apply_update(self) -> None:
        with profiled("update", self.label):
            self.update.apply(self.present)

    def _gather_gradient(self, part: slice | None) -> Handle[Tensor]:
        return self._collectives.all_gather(
            self.gradients.flat, codec=self._codec, feedback=self.residuals(), part=part
        )

    @property
    def _largest_shard(self) -> int:
        return shard_numel(self.gradients.flat.numel(), self._collectives.topology.num_shards)

    @property
    def _all_early(self) -> bool:
        return not self.sharded and self._num_early == self._largest_shard

    @torch.no_grad()
    def _finish_all_gather(self) -> None:
        if not self.sharded:
            self._apply_update()
        elif self._difference is not None:
            assert self.values is not None
            self.values.flat.add_(self._difference)
            if self._dropped is not None:
                torch.sub(self._updated, self._shard, out=self._dropped)
                self._dropped.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # so that it does not affect later steps
            self.values.zero_gaps()


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
