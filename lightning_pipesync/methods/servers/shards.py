"""The servers' shards of the weights: what a server holds, and what a learner sends and receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Bucket, flattened, shaped, shard_of, shard_slice
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.codecs.codec import accumulation_dtype
from lightning_pipesync.core.feedback import encode_with_feedback
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import foreach_add_
from lightning_pipesync.methods.gradients.bucket_update import BucketUpdate, Piece, slices_in_shard
from lightning_pipesync.methods.servers.config import ParameterServerConfig


class SharedBucket:
    """Parameters of one group, dtype and device in one buffer, which is divided among the servers.

    ``group`` has the indices of the optimizer and of the parameter group, ``places`` each parameter's slice by name.
    """

    def __init__(self, members: Sequence[NamedParameter], num_servers: int, config: ParameterServerConfig) -> None:
        assert members[0].group is not None
        self.members, self.group = list(members), members[0].group
        self._num_servers = num_servers
        self._codec = get_codec(config.compression)
        self._tensors = [member.tensor for member in members]
        self._gradients, self._values = Bucket(self._tensors), Bucket(self._tensors)
        self.packed = self._gradients.flat  # the packed gradients: 1-D, with padding
        self._values.pack(self._tensors)  # what all ranks have at first
        self.places = {m.name: place for m, place in zip(members, self._gradients.places, strict=True)}
        self.residual: Tensor | None = None  # of the error feedback, by element of the buffer
        self._idle: Tensor | None = None  # True for values of parameters without a gradient
        if config.uses_error_feedback:
            self.residual = torch.zeros_like(self.packed, dtype=accumulation_dtype(self.packed.dtype))

    def pack(self) -> list[bool]:
        """Copies the gradients into the buffer, zeros for None; returns which parameters have one."""
        present = self._gradients.pack_gradients(self._tensors)
        if self.residual is not None:
            self._idle = self._gradients.idle(present, self._codec.reach)
        return present

    def pack_values(self) -> None:
        """Copies the parameters into the buffer of the gradients."""
        self._idle = None
        self._gradients.pack(self._tensors)

    @torch.no_grad()
    def pack_movement(self) -> None:
        """Copies the received weights minus the parameters into the buffer of the gradients."""
        self.pack_values()
        self.packed.neg_().add_(self._values.flat)

    def clear_gradients(self) -> None:
        for tensor in self._tensors:
            tensor.grad = None

    def encoded(self, server: int) -> Tensor:
        """Returns a server's encoded shard of the packed gradients: 1-D, uint8."""
        shard = shard_of(self.packed, server, self._num_servers)
        wire = torch.empty(self._codec.wire_bytes(shard.numel(), shard.dtype), dtype=torch.uint8, device=shard.device)
        residual, idle = (
            None if one is None else shard_of(one, server, self._num_servers) for one in (self.residual, self._idle)
        )
        encode_with_feedback(self._codec, shard, wire, residual, idle)
        return wire

    def receive(self, server: int, values: Tensor) -> None:
        """Stores a server's shard of the weights for :meth:`unpack`."""
        if values.is_cuda:  # this rank's server has allocated it on its own stream
            values.record_stream(torch.cuda.current_stream(values.device))
        shard_of(self._values.flat, server, self._num_servers).copy_(values, non_blocking=True)

    def unpack(self) -> None:
        """Copies the received weights into the parameters."""
        self._values.unpack(self._tensors)

    @torch.no_grad()
    def unpack_moved_on(self, before: Tensor) -> None:
        """Makes the parameters what was received, moved as far as they have moved since they were ``before``."""
        self.packed.copy_(self._values.flat).sub_(before)
        foreach_add_(self._tensors, self._gradients.views, alpha=1)

    def unpack_from(self, flat: Tensor) -> None:
        """Copies a clone of :attr:`packed` into the parameters."""
        self.packed.copy_(flat)
        self._gradients.unpack(self._tensors)

    @torch.no_grad()
    def subtract(self) -> None:
        """Subtracts what was received from the parameters."""
        foreach_add_(self._tensors, self._values.views, alpha=-1)

    def shard(self, server: int) -> slice:
        return shard_slice(self.packed.numel(), server, self._num_servers)

    def slices(self, server: int) -> dict[str, slice]:
        """Returns a server's slices of the parameters, by name."""
        return slices_in_shard(self.shard(server), self.places)


class ServedShard:
    """A server's shard of a bucket, with a copy of the user's ``optimizer`` for it.

    A shard that is the whole bucket keeps the shapes of the parameters, for optimizers that are not element-wise.
    """

    def __init__(
        self, bucket: SharedBucket, server: int, optimizer: Optimizer, config: ParameterServerConfig, num_servers: int
    ) -> None:
        self.bucket, self._codec = bucket, get_codec(config.compression)
        shard, slices = bucket.shard(server), bucket.slices(server)
        self.values = torch.zeros_like(bucket.packed[shard])
        self._gradient = torch.zeros_like(self.values)
        self._pieces: list[Piece] = []
        for i, member in enumerate(bucket.members):
            if member.name in slices:
                part, begin = slices[member.name], bucket.places[member.name].start - shard.start
                place = slice(begin + part.start, begin + part.stop)
                values, grad, name, tensor = self.values[place], self._gradient[place], member.name, member.tensor
                if num_servers == 1:
                    piece = Piece(i, name, tensor, shaped(values, tensor), shaped(grad, tensor), None)
                else:
                    piece = Piece.in_shard(i, name, tensor, values, grad, part)
                self._pieces.append(piece)
        flat = (self.values, self._gradient) if config.is_elementwise(optimizer) else (None, None)
        self.update = BucketUpdate(optimizer, bucket.group[1], self._pieces, *flat)
        dtype = accumulation_dtype(self.values.dtype)
        self._total = self._gradient if dtype == self.values.dtype else torch.empty_like(self._gradient, dtype=dtype)
        self._decoded = torch.empty_like(self._total)
        self._dc_lambda = config.dc_lambda
        self._present: Sequence[bool] | None = None  # in the last update
        self.read_weights()

    @torch.no_grad()
    def read_weights(self) -> None:
        """Copies the user's parameters into the shard."""
        self._present = None
        for piece in self._pieces:
            whole = piece.parameter.detach()
            piece.values.copy_(whole if piece.place is None else flattened(whole, whole)[piece.place])

    @torch.no_grad()
    def squared_distance(self, others: Tensor) -> Tensor:
        """Returns the squared L2 distance of the weights from ``others``: 0-dim, float64."""
        return (self.values - others).square_().sum(dtype=torch.float64)

    def average(
        self, wires: Sequence[Tensor], weights: Sequence[float], computed_at: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Returns the weighted mean of encoded gradients, in a buffer that :meth:`step` uses.

        With ``computed_at``, the weights at which each gradient was computed, DC-ASGD compensates the delay.
        """
        if not self.values.numel():
            return self._gradient
        for i, (wire, weight) in enumerate(zip(wires, weights, strict=True)):
            wire = wire.to(self._total.device, non_blocking=True)
            if weight != 1 or computed_at is not None:
                self._codec.decode(wire, self._decoded, self.values.dtype)
                if computed_at is not None:
                    # DC-ASGD Eq. 10: the Hessian is approximated by lambda times the diagonal of g g^T.
                    moved = (self.values - computed_at[i]).to(self._decoded.dtype)
                    self._decoded.addcmul_(self._decoded * self._decoded, moved, value=self._dc_lambda)
                if i == 0:
                    self._total.zero_()
                self._total.add_(self._decoded, alpha=weight)
            elif i == 0:
                self._codec.decode(wire, self._total, self.values.dtype)
            else:
                self._codec.decode_add(wire, self._total, self.values.dtype)
        if len(wires) > 1:
            self._total.div_(len(wires))
        if self._total is not self._gradient:
            self._gradient.copy_(self._total)
        return self._gradient

    @torch.no_grad()
    def pull(self, wire: Tensor, force: float) -> Tensor:
        """Moves the weights towards an encoded replica; returns what to subtract from it (EASGD, Algorithm 1)."""
        replica = torch.empty_like(self.values)
        self._codec.decode(wire.to(self.values.device, non_blocking=True), replica, self.values.dtype)
        moved = replica.sub_(self.values).mul_(force)
        self.values.add_(moved)
        return moved

    @torch.no_grad()
    def step(self, present: Sequence[bool], hyperparameters: Mapping[str, Any]) -> None:
        """Updates the weights by the mean gradient; ``present``: which parameters of the bucket have one."""
        self.update.set_hyperparameters(hyperparameters)
        self.update.apply(present)
        self._present = present

    @torch.no_grad()
    def ahead(self, updates: float) -> Tensor:
        """Returns a prediction of the weights after more updates, with gradients of zero: momentum alone moves them.

        A fraction of an update is interpolated (SpecTrain, Chen et al.).
        """
        if not updates or self._present is None:
            return self.values.clone()
        whole, part = divmod(updates, 1)
        with self.update.trial():
            self._gradient.zero_()
            for _ in range(int(whole)):
                self.update.apply(self._present)
            predicted = self.values.clone()
            if part:
                self.update.apply(self._present)
                predicted.add_(self.values.sub(predicted), alpha=part)
        return predicted
