"""A bucket of fused parameters: the two halves of its all-reduce, and its update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Bucket, shard_numel, zeros_with_room
from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.dtensors import LocalShard
from lightning_pipesync.core.guarded_states import at_hand, send_away
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.gradients.bucket import GradientBucket
from lightning_pipesync.methods.gradients.bucket_update import BucketUpdate, Piece, slices_in_shard
from lightning_pipesync.methods.gradients.feedpipe import UnwrittenWeights
from lightning_pipesync.methods.gradients.low_rank import LowRankGradients, low_rank_bucket

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
