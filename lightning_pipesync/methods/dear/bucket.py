"""Parameters that travel in one piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm_queue import CommQueue
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.parts import parts_in
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
        # Weights that are rounded anew in every step would not move. What travels instead is their difference to what
        # all ranks have, and what the codec drops of it is added to the weights before the next update, if wanted.
        self._difference = None if codec.lossless or not self.sharded else torch.empty_like(self.values.flat)
        self.own_gradient = transport.shard(self.gradients.flat)
        own = transport.shard(self.values.flat)
        self._own, self._updated = own, own if self._difference is None else own.clone()
        self._dropped = torch.zeros_like(own) if config.uses_error_feedback and self.sharded else None
        self.update = BucketUpdate(optimizer, self.group[1], self._pieces())
        for tensor in self._tensors:
            optimizer.state.pop(tensor, None)
        self.present = [True] * len(self._tensors)
        self.num_awaited = 0
        self.launched = False
        self._arriving: Handle[Tensor] | None = None  # what brings the weights up to date

    def expect_gradients(self) -> None:
        """Gets ready for a backward pass."""
        self.num_awaited = sum(tensor.requires_grad for tensor in self._tensors)
        self.launched = False

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copies the gradients into their buffer; one that is missing counts as zero."""
        for tensor, view in zip(self._tensors, self.values.views, strict=True):
            if tensor.data_ptr() != view.data_ptr():  # the user has given the parameter other memory
                view.copy_(tensor)
                tensor.data = view
        self.launched = True
        self.present = self.gradients.pack_gradients(self._tensors)

    def feed(self, queue: CommQueue) -> None:
        """Starts to bring the weights up to date, with learning rate and so on as they are now."""
        self.update.keep_hyperparameters()
        self._arriving = queue.submit("all_gather", self._start_feeding, lambda _: self._finish_feeding())

    def wait(self) -> None:
        """Blocks until the weights are up to date.

        Raises:
            RuntimeError: a peer is lost.
        """
        if self._arriving is not None:
            self._arriving.wait()

    def start_reducing(self) -> Handle[Tensor]:
        """Starts the reduce-scatter."""
        return self._transport.reduce_scatter(
            self.gradients.flat, codec=self._codec, mean=True, feedback=self._feedback
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what the codec needs besides the weights: nothing, without error feedback."""
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

    def residuals_of_shard(self) -> dict[str, dict[str, Tensor]]:
        """Returns what the codec has dropped of this rank's shard, by parameter and kind: views."""
        residuals: dict[str, dict[str, Tensor]] = {}
        of_feedback = None if self._feedback is None else self._feedback.shard
        for kind, shard in (("weights", self._dropped), ("feedback", of_feedback)):
            for name, values in ({} if shard is None else self._in_shard(shard)).items():
                residuals.setdefault(name, {})[kind] = values
        return residuals

    def residuals_of_gradients(self) -> dict[str, Tensor]:
        """Returns what the codec has dropped of this rank's gradients, by parameter: views."""
        if self._feedback is None:
            return {}
        return {name: self._feedback.contribution[place] for name, place in self._places().items()}

    def take_residuals(self, of_shard: Mapping[str, Mapping[str, Tensor]], of_gradients: Mapping[str, Tensor]) -> None:
        """Goes on from the residuals of the same parameters in other buckets."""
        for name, kinds in self.residuals_of_shard().items():
            for kind, values in kinds.items():
                values.copy_(of_shard[name][kind])
        for name, values in self.residuals_of_gradients().items():
            values.copy_(of_gradients[name])

    def release(self) -> None:
        """Gives every parameter memory of its own again."""
        for tensor in self._tensors:
            tensor.data = tensor.data.clone()

    def parts_to_update(self, rank: int) -> dict[str, slice]:
        """Returns which parts of the parameters, by name, a rank updates: all of them, or those in its shard."""
        return self.parts_in_shard(rank) if self.sharded else self.whole()

    def parts_in_shard(self, rank: int) -> dict[str, slice]:
        """Returns which parts of the parameters, by name, lie in a rank's shard."""
        shard = self._transport.shard_slice(self.values.flat.numel(), rank)
        return parts_in(shard, self._places())

    def whole(self) -> dict[str, slice]:
        """Returns all of the parameters, by name."""
        return {member.name: slice(0, member.tensor.numel()) for member in self.members}

    def _in_shard(self, shard: Tensor) -> dict[str, Tensor]:
        """Returns what belongs to each parameter, by name, of a tensor that is like this rank's shard."""
        places = self._places()
        begin = self._transport.shard_slice(self.values.flat.numel(), self._transport.rank).start
        return {
            name: shard[places[name].start + part.start - begin : places[name].start + part.stop - begin]
            for name, part in self.parts_in_shard(self._transport.rank).items()
        }

    def _places(self) -> dict[str, slice]:
        """Returns which values of the buffers belong to each parameter, by name."""
        return {member.name: place for member, place in zip(self.members, self.values.places, strict=True)}

    def _pieces(self) -> list[Piece]:
        """Returns what this rank updates."""
        names, tensors = [member.name for member in self.members], self._tensors
        if not self.sharded:
            rows = zip(names, tensors, self.values.views, self.gradients.views, strict=True)
            return [Piece(i, *row, None) for i, row in enumerate(rows)]
        parts = self.parts_in_shard(self._transport.rank)
        values, gradients = self._in_shard(self._updated), self._in_shard(self.own_gradient)
        return [
            Piece(i, name, tensor, values[name], gradients[name], parts[name])
            for i, (name, tensor) in enumerate(zip(names, tensors, strict=True))
            if name in parts
        ]

    @torch.no_grad()
    def _start_feeding(self) -> Handle[Tensor]:
        """Starts the all-gather: of the weights that this rank has updated, or of the averaged gradients."""
        if not self.sharded:
            return self._transport.all_gather(self.gradients.flat, codec=self._codec, feedback=self._feedback)
        if self._difference is None:
            self.update.apply(self.present)
            return self._transport.all_gather(self.values.flat, codec=self._codec)
        self._updated.copy_(self._own)
        if self._dropped is not None:
            self._updated.add_(self._dropped)
        self.update.apply(self.present)
        torch.sub(self._updated, self._own, out=self._transport.shard(self._difference))
        return self._transport.all_gather(self._difference, codec=self._codec)

    @torch.no_grad()
    def _finish_feeding(self) -> None:
        """Has the weights up to date when the all-gather is complete."""
        if not self.sharded:
            self.update.apply(self.present)
        elif self._difference is not None:
            self.values.flat.add_(self._difference)
            if self._dropped is not None:
                torch.sub(self._updated, self._own, out=self._dropped)
