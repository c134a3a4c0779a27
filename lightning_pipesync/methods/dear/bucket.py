"""A bucket of fused parameters, and its two halves of the all-reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Bucket, shard_numel
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import version
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.gradients.bucket_update import BucketUpdate, Piece
from lightning_pipesync.methods.gradients.reshard import slices_in_shard


class FusedBucket:
    """Parameters of one group of one optimizer, which become views of one buffer.

    Attributes:
        members: the parameters.
        sharded: whether this rank updates its shard only.
        group: indices of their optimizer and of their parameter group there.
        gradients: buffer of their gradients.
        own_gradient: this rank's shard of ``gradients``, which the reduce-scatter averages.
        values: buffer of their values.
        update: the optimizer's step on them.
        present: for each parameter whether it has a gradient in this step: on this rank, or on any once that is known.

    Args:
        members: the parameters.
        optimizers: the user's own, one of which has them.
        config: the settings.
        transport: the way to the other ranks.
    """

    def __init__(
        self,
        members: Sequence[NamedParameter],
        optimizers: Sequence[Optimizer],
        config: DeARConfig,
        transport: Transport,
    ) -> None:
        assert members[0].group is not None
        self.members, self.group, self._transport = list(members), members[0].group, transport
        optimizer, codec = optimizers[self.group[0]], get_codec(config.compression)
        self._codec, self.sharded = codec, config.shards(optimizer)
        self._tensors = [member.tensor for member in members]
        self.gradients, self.values = Bucket(self._tensors), Bucket(self._tensors)
        self.values.pack(self._tensors)
        for tensor, view in zip(self._tensors, self.values.views, strict=True):
            tensor.data = view
        self._feedback = transport.feedback(self.gradients.flat) if config.uses_error_feedback else None
        # Weights that a lossy codec rounds at every step would not move. So it encodes their difference to the weights
        # that all ranks have. With error feedback its error is added to the weights before the next update.
        self._difference = None if codec.lossless or not self.sharded else torch.empty_like(self.values.flat)
        self.own_gradient = transport.shard(self.gradients.flat)
        own = transport.shard(self.values.flat)
        self._own, self._updated = own, own if self._difference is None else own.clone()
        self._dropped = torch.zeros_like(own) if config.uses_error_feedback and self.sharded else None
        # A step on the whole buffer also updates the gaps between parameters, which a lossy codec must not see.
        whole = self._whole() if config.is_elementwise(optimizer) and codec.lossless else (None, None)
        self.update = BucketUpdate(optimizer, self.group[1], self._pieces(), *whole)
        for tensor in self._tensors:
            optimizer.state.pop(tensor, None)
        self.present = [True] * len(self._tensors)
        self._noted: list[tuple[int, int] | None] = []
        self._reduced: Queued[Tensor] | None = None
        self._gathered: Handle[Tensor] | None = None
        self._num_early = 0  # values of each rank's shard that are gathered under backward

    @property
    def averaged(self) -> list[Tensor]:
        """What this rank has of the averaged gradient after backward: its shard, and what was gathered early."""
        if self._all_early:
            return [self.gradients.flat]
        early = self._transport.parts(self.gradients.flat, slice(self._num_early))
        return [*early, self.own_gradient[self._num_early :]]

    @property
    def num_gradients(self) -> int:
        """Number of gradients that a backward pass computes."""
        return sum(tensor.requires_grad for tensor in self._tensors)

    @torch.no_grad()
    def reduce_scatter(self, queue: CommQueue) -> None:
        """Packs the gradients, zeros for missing ones, and starts their reduce-scatter (OP1)."""
        for tensor, view in zip(self._tensors, self.values.views, strict=True):
            if tensor.data_ptr() != view.data_ptr():  # the user has given the parameter other memory
                view.copy_(tensor)
                tensor.data = view
        self.present = self.gradients.pack_gradients(self._tensors)
        self.note_gradients()
        self._reduced = queue.submit("reduce_scatter", self._start_reduce_scatter)
        self._num_early = 0

    def note_gradients(self) -> None:
        """Notes which gradients the parameters have, and what was written to them."""
        self._noted = _versions(self._tensors)

    @property
    def written(self) -> str | None:
        """The name of a parameter whose gradient was written to since :meth:`note_gradients`; None if none was.

        Of gradients that share memory, as views of one buffer, only the replaced ones are known.
        """
        now = _versions(self._tensors)
        if now == self._noted:
            return None
        for member, current, noted in zip(self.members, now, self._noted, strict=True):
            same = current and noted and current[0] == noted[0]
            if current != noted and not (same and _is_part(member.tensor.grad)):
                return member.name
        return None

    def gather_early(self, queue: CommQueue, pieces: int) -> None:
        """Starts the all-gather of the next of ``pieces`` equal pieces of each rank's shard, after the reduce-scatter.

        This is for a bucket that is not sharded.
        """
        assert self._reduced is not None
        begin, largest = self._num_early, self._largest_shard
        self._num_early = min(largest, begin + -(-largest // pieces))
        part = None if pieces == 1 else slice(begin, self._num_early)
        queue.submit("all_gather", lambda: self._gather_gradient(part), requires=self._reduced)

    def start_update(self, queue: CommQueue) -> None:
        """Starts the update, with the current hyper-parameters, and the all-gather (OP2) unless it has run."""
        self.update.copy_hyperparameters()
        start = self._already_gathered if self._all_early else self._start_all_gather
        self._gathered = queue.submit("all_gather", start, lambda _: self._finish_all_gather())

    def wait(self) -> None:
        """Blocks until the weights are up to date.

        Raises:
            RuntimeError: a peer is lost.
        """
        if self._gathered is not None:
            self._gathered.wait()

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of the codec; empty without error feedback."""
        state: dict[str, Any] = {}
        if self._dropped is not None:
            state["dropped"] = self._dropped
        if self._feedback is not None:
            state["feedback"] = self._feedback.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        if self._dropped is not None:
            self._dropped.copy_(state["dropped"])
        if self._feedback is not None:
            self._feedback.load_state_dict(state["feedback"])

    def residuals_of_shard(self) -> dict[str, dict[str, Tensor]]:
        """Returns views of the residuals of this rank's shard, by parameter and kind."""
        residuals: dict[str, dict[str, Tensor]] = {}
        of_feedback = None if self._feedback is None else self._feedback.shard
        for kind, shard in (("weights", self._dropped), ("feedback", of_feedback)):
            for name, values in ({} if shard is None else self._in_shard(shard)).items():
                residuals.setdefault(name, {})[kind] = values
        return residuals

    def residuals_of_gradients(self) -> dict[str, Tensor]:
        """Returns views of the residuals of this rank's gradients, by parameter."""
        if self._feedback is None:
            return {}
        return {name: self._feedback.contribution[place] for name, place in self._places().items()}

    def load_residuals(self, of_shard: Mapping[str, Mapping[str, Tensor]], of_gradients: Mapping[str, Tensor]) -> None:
        """Copies the residuals of the same parameters in other buckets."""
        for name, kinds in self.residuals_of_shard().items():
            for kind, values in kinds.items():
                values.copy_(of_shard[name][kind])
        for name, values in self.residuals_of_gradients().items():
            values.copy_(of_gradients[name])

    def release(self) -> None:
        """Moves every parameter out of the buffer, to memory of its own."""
        for tensor in self._tensors:
            tensor.data = tensor.data.clone()

    def updated_slices(self, rank: int) -> dict[str, slice]:
        """Returns the slices of the parameters, by name, that a rank updates: whole ones, or those in its shard."""
        return self.shard_slices(rank) if self.sharded else self.whole_slices()

    def shard_slices(self, rank: int) -> dict[str, slice]:
        """Returns the slices of the parameters, by name, in a rank's shard."""
        shard = self._transport.shard_slice(self.values.flat.numel(), rank)
        return slices_in_shard(shard, self._places())

    def whole_slices(self) -> dict[str, slice]:
        """Returns the slices of the whole parameters, by name."""
        return {member.name: slice(0, member.tensor.numel()) for member in self.members}

    def _in_shard(self, shard: Tensor) -> dict[str, Tensor]:
        """Returns the views of each parameter, by name, of a tensor of the shape of this rank's shard."""
        places = self._places()
        begin = self._transport.shard_slice(self.values.flat.numel(), self._transport.rank).start
        return {
            name: shard[places[name].start + place.start - begin : places[name].start + place.stop - begin]
            for name, place in self.shard_slices(self._transport.rank).items()
        }

    def _places(self) -> dict[str, slice]:
        """Returns the slice of the buffers of each parameter, by name."""
        return {member.name: place for member, place in zip(self.members, self.values.places, strict=True)}

    def _pieces(self) -> list[Piece]:
        """Returns what this rank updates."""
        names, tensors = [member.name for member in self.members], self._tensors
        if not self.sharded:
            rows = zip(names, tensors, self.values.views, self.gradients.views, strict=True)
            return [Piece(i, *row, None) for i, row in enumerate(rows)]
        slices = self.shard_slices(self._transport.rank)
        values, gradients = self._in_shard(self._updated), self._in_shard(self.own_gradient)
        return [
            Piece.in_shard(i, name, tensor, values[name], gradients[name], slices[name])
            for i, (name, tensor) in enumerate(zip(names, tensors, strict=True))
            if name in slices
        ]

    def _whole(self) -> tuple[Tensor, Tensor]:
        """Returns the buffers that hold what this rank updates: values and gradients."""
        return (self._updated, self.own_gradient) if self.sharded else (self.values.flat, self.gradients.flat)

    def _start_reduce_scatter(self) -> Handle[Tensor]:
        return self._transport.reduce_scatter(
            self.gradients.flat, codec=self._codec, mean=True, feedback=self._feedback
        )

    @torch.no_grad()
    def _start_all_gather(self) -> Handle[Tensor]:
        """Starts the all-gather: of the weights, after this rank has updated its shard, or of the gradients."""
        if not self.sharded:
            return self._gather_gradient(slice(self._num_early, None) if self._num_early else None)
        if self._difference is None:
            self.update.apply(self.present)
            return self._transport.all_gather(self.values.flat, codec=self._codec)
        self._updated.copy_(self._own)
        if self._dropped is not None:
            self._updated.add_(self._dropped)
        self.update.apply(self.present)
        torch.sub(self._updated, self._own, out=self._transport.shard(self._difference))
        return self._transport.all_gather(self._difference, codec=self._codec)

    def _gather_gradient(self, part: slice | None) -> Handle[Tensor]:
        return self._transport.all_gather(self.gradients.flat, codec=self._codec, feedback=self._feedback, part=part)

    @property
    def _largest_shard(self) -> int:
        return shard_numel(self.gradients.flat.numel(), self._transport.world_size)

    @property
    def _all_early(self) -> bool:
        return not self.sharded and self._num_early == self._largest_shard

    def _already_gathered(self) -> Handle[Tensor]:
        return Handle(lambda: self.gradients.flat)

    @torch.no_grad()
    def _finish_all_gather(self) -> None:
        """Brings the weights up to date after the all-gather."""
        if not self.sharded:
            self.update.apply(self.present)
        elif self._difference is not None:
            self.values.flat.add_(self._difference)
            if self._dropped is not None:
                torch.sub(self._updated, self._own, out=self._dropped)


def _versions(parameters: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """Returns for each parameter which gradient it has, and how often that was written to; None without one."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (gradient.data_ptr(), version(gradient)) for gradient in gradients]


def _is_part(gradient: Tensor | None) -> bool:
    """Returns whether other tensors may share the memory of a gradient, and so its number of writes."""
    return gradient is not None and gradient.untyped_storage().nbytes() > gradient.nbytes
