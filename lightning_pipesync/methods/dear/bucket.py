"""Parameters that travel in one piece."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.compat import foreach_copy_
from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.update import BucketUpdate, Piece


class FusedBucket:
    """Some parameters of one group of one optimizer, which become views of one buffer.

    Attributes:
        members: the parameters.
        sharded: whether this rank updates its shard only.
        group: indices of their optimizer and of their parameter group there.
        gradients: buffer of their gradients.
        own_gradient: the shard of ``gradients`` that this rank knows the average of.
        values: buffer of their values.
        update: the optimizer's step on them.
        present: for each of them whether it has a gradient in this step, on any rank once that is known.
        num_awaited: how many of their gradients are not ready yet, in this backward pass.
        launched: whether the gradients are on their way.
        arrived: whether the weights are up to date.

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
        self.members, self.group = list(members), members[0].group
        optimizer, codec = optimizers[self.group[0]], get_codec(config.compression)
        self._codec, self.sharded = codec, config.shards(optimizer)
        self._tensors = [member.tensor for member in members]
        self.gradients, self.values = Bucket(self._tensors), Bucket(self._tensors)
        self.values.pack(self._tensors)
        for tensor, view in zip(self._tensors, self.values.views, strict=True):
            tensor.data = view
        self._feedback = None if codec.lossless else transport.feedback(self.gradients.flat)
        # Weights that are rounded anew in every step would not move. What travels instead is their difference to what
        # all ranks have, and what the codec drops of it is added to the weights before the next update.
        self._difference = None if codec.lossless or not self.sharded else torch.empty_like(self.values.flat)
        self.own_gradient = transport.shard(self.gradients.flat)
        own = transport.shard(self.values.flat)
        self._own, self._updated = own, own if self._difference is None else own.clone()
        self._dropped = torch.zeros_like(own) if self._difference is not None else None
        pieces = self._pieces_of_shard() if self.sharded else self._whole_pieces()
        self.update = BucketUpdate(optimizer, self.group[1], pieces)
        for tensor in self._tensors:
            optimizer.state.pop(tensor, None)
        self.present = [True] * len(self._tensors)
        self.num_awaited = 0
        self.launched = False
        self.arrived = threading.Event()
        self.arrived.set()

    def expect_gradients(self) -> None:
        """Gets ready for a backward pass."""
        self.num_awaited = sum(tensor.requires_grad for tensor in self._tensors)
        self.launched = False

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copies the gradients into their buffer; one that is missing counts as zero."""
        gradients = [tensor.grad for tensor in self._tensors]
        self.present = [gradient is not None for gradient in gradients]
        for tensor, view in zip(self._tensors, self.values.views, strict=True):
            if tensor.data_ptr() != view.data_ptr():  # the user has given the parameter other memory
                view.copy_(tensor)
                tensor.data = view
        self.launched = True
        if not all(self.present):
            self.gradients.flat.zero_()
        pairs = [(v, g) for v, g in zip(self.gradients.views, gradients, strict=True) if g is not None]
        foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])

    def start_reducing(self, transport: Transport) -> Handle[Tensor]:
        """Starts the reduce-scatter."""
        return transport.reduce_scatter(self.gradients.flat, codec=self._codec, mean=True, feedback=self._feedback)

    @torch.no_grad()
    def start_feeding(self, transport: Transport) -> Handle[Tensor]:
        """Starts the all-gather: of the weights that this rank has updated, or of the averaged gradients."""
        if not self.sharded:
            return transport.all_gather(self.gradients.flat, codec=self._codec, feedback=self._feedback)
        if self._difference is None or self._dropped is None:
            self.update.apply(self.present)
            return transport.all_gather(self.values.flat, codec=self._codec)
        torch.add(self._own, self._dropped, out=self._updated)
        self.update.apply(self.present)
        torch.sub(self._updated, self._own, out=transport.shard(self._difference))
        return transport.all_gather(self._difference, codec=self._codec)

    @torch.no_grad()
    def finish_feeding(self) -> None:
        """Has the weights up to date when the all-gather is complete."""
        if not self.sharded:
            self.update.apply(self.present)
        elif self._difference is not None:
            self.values.flat.add_(self._difference)
            torch.sub(self._updated, self._own, out=self._dropped)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the codec needs besides the weights: nothing, if it is lossless."""
        state: dict[str, Any] = {}
        if self._dropped is not None:
            state["dropped"] = self._dropped
        if self._feedback is not None:
            state["feedback"] = self._feedback.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank."""
        if self._dropped is not None:
            self._dropped.copy_(state["dropped"])
        if self._feedback is not None:
            self._feedback.load_state_dict(state["feedback"])

    def release(self) -> None:
        """Gives every parameter memory of its own again."""
        for tensor in self._tensors:
            tensor.data = tensor.data.clone()

    def _whole_pieces(self) -> list[Piece]:
        triples = zip(self._tensors, self.values.views, self.gradients.views, strict=True)
        return [Piece(i, tensor, value, gradient, None) for i, (tensor, value, gradient) in enumerate(triples)]

    def _pieces_of_shard(self) -> list[Piece]:
        """Returns the part of each tensor that lies in this rank's shard, unless there is none."""
        begins, first = self._begins(), self._own.storage_offset()
        pieces = []
        for i, place in self.places_in_shard():
            in_parameter = slice(place.start + first - begins[i], place.stop + first - begins[i])
            pieces.append(Piece(i, self._tensors[i], self._updated[place], self.own_gradient[place], in_parameter))
        return pieces

    def places_in_shard(self) -> list[tuple[int, slice]]:
        """Returns for each tensor that lies in this rank's shard, with a part at least, its index and where it is."""
        first = self._own.storage_offset()
        places = []
        for i, (begin, tensor) in enumerate(zip(self._begins(), self._tensors, strict=True)):
            start, stop = max(begin - first, 0), min(begin + tensor.numel() - first, self._own.numel())
            if start < stop:
                places.append((i, slice(start, stop)))
        return places

    def _begins(self) -> list[int]:
        """Returns where each tensor begins in the buffer."""
        return [0, *itertools.accumulate(tensor.numel() for tensor in self._tensors)][:-1]
