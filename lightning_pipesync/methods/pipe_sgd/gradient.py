"""The gradient of one step, from the backward pass that made it to the update that uses it, k steps later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import MIB, Bucket, Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm_queue import CommQueue
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.norm import SquaredNorm
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import foreach_mul_, foreach_norm
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.hyperparameters import Hyperparameters, current
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.presence import Presence

#: Bytes of a piece that each rank sums: so much that messages are large, and so little that one half of an all-reduce
#: of a large buffer overlaps with the other half.
SHARD_OF_PIECE = 4 * MIB


class GradientPlan:
    """Into which buffers the gradients of some parameters are packed, step after step.

    Attributes:
        buckets: the parameters that travel together, in the order in which their gradients are expected.
        members: all of them, bucket by bucket.
        place: by the id of a parameter the index of its bucket.
        compared: which parameters, bucket by bucket, had a gradient when the ranks last compared: on this rank, on any.
        feedback: for each piece of each bucket what its codec dropped, if that is sent later.
        codec: what travels.
        keeps_weights: whether gradients need to know the weights that they were computed with.
        predicts: whether they know this rank's own part, to predict weights with.
        keeps_own: whether they keep its values; zeros are taken for it otherwise.
        saves_own: whether a checkpoint has them.

    Args:
        parameters: in the order of registration.
        config: the settings.
        transport: the way to the other ranks.
    """

    def __init__(self, parameters: Sequence[NamedParameter], config: PipeSGDConfig, transport: Transport) -> None:
        ready_order = [replace(parameter, group=None) for parameter in reversed(parameters)]
        if config.pipeline_level == 1:
            self.buckets = plan_buckets(ready_order, Fusion(bucket_mb=config.bucket_mb or math.inf))
        else:
            segments = _segments(ready_order, config.segments)
            self.buckets = [b for part in segments for b in plan_buckets(part, Fusion(bucket_mb=math.inf))]
        self.members = [member for members in self.buckets for member in members]
        self.place = {id(member.tensor): index for index, members in enumerate(self.buckets) for member in members}
        self.compared = [True] * len(parameters), [True] * len(parameters)
        self.codec = get_codec(config.compression)
        self._world_size = transport.world_size
        self._free: list[list[Bucket]] = [self._new_buffers()]
        self.feedback = [
            [transport.feedback(piece) if config.uses_error_feedback else None for piece in self.pieces(bucket)]
            for bucket in self._free[0]
        ]
        self.keeps_weights = config.delay_compensation == "distance"
        self.predicts, self.keeps_own = config.predicts, config.keeps_own_gradients
        self.saves_own = config.checkpoint_own_gradients

    def pieces(self, bucket: Bucket) -> Sequence[Tensor]:
        """Returns what of a bucket is exchanged at a time: views."""
        numel = SHARD_OF_PIECE * self._world_size // bucket.flat.element_size()
        return bucket.flat.split(numel)

    def take_buffers(self) -> list[Bucket]:
        """Returns a buffer for each bucket; its content is undefined."""
        return self._free.pop() if self._free else self._new_buffers()

    def give_buffers(self, buffers: list[Bucket]) -> None:
        """Takes back what :meth:`take_buffers` returned."""
        self._free.append(buffers)

    def _new_buffers(self) -> list[Bucket]:
        return [Bucket([member.tensor for member in members], strided=True) for members in self.buckets]


class GradientInFlight:
    """The gradient of one step, which is averaged over the ranks beside the steps that follow.

    Attributes:
        hyperparameters: learning rate and so on of the optimizer when it was computed.
        loss_scale: by which it is too large.
        num_updates: how many updates had been made when it was computed.
        own: this rank's part of it, not scaled, by the id of the parameter, None for one of zeros; empty if nothing is
            predicted with it.

    Args:
        plan: how it is packed.
        queue: on which it travels (Algorithm 1, communication thread).
        transport: the way to the other ranks.
    """

    hyperparameters: Hyperparameters
    loss_scale: float
    num_updates: int

    def __init__(self, plan: GradientPlan, queue: CommQueue, transport: Transport) -> None:
        self._plan, self._queue, self._transport = plan, queue, transport
        self._buffers = plan.take_buffers()
        self._weights: list[Bucket] | None = None
        self._awaited = [sum(member.tensor.requires_grad for member in members) for members in plan.buckets]
        self._ready: set[int] = set()
        self._handles: list[Handle[Tensor]] = []
        self._num_sent = 0  # buckets
        self._own_present: list[bool] = []
        self._presence: Presence | None = None
        self._present: list[bool] = []
        self.own: dict[int, Tensor | None] = {}
        self._own_norm = SquaredNorm([])

    def is_ready(self, parameter: Tensor) -> None:
        """Sends the segments that are complete (Fig. 7), now that this parameter's gradient is.

        Raises:
            RuntimeError: it was complete before.
        """
        if id(parameter) in self._ready:
            raise RuntimeError(
                "pipeline_level=2 has sent this gradient already, and a further backward pass changes it: put all "
                "backward passes of a step but the last under no_sync() (in a LightningModule: "
                "self.trainer.strategy.block_backward_sync()), or use pipeline_level=1."
            )
        self._ready.add(id(parameter))
        self._awaited[self._plan.place[id(parameter)]] -= 1
        while self._num_sent < len(self._awaited) and self._awaited[self._num_sent] <= 0:
            self._send_next()

    @torch.no_grad()
    def hand_over(self, optimizer: Optimizer, loss_scale: float, num_updates: int, grad_is_reused: bool) -> None:
        """Sends what has not been sent yet (Algorithm 1, computation thread, lines 9 and 10).

        Args:
            optimizer: whose gradient it is.
            loss_scale: by which it is too large.
            num_updates: that have been made so far.
            grad_is_reused: whether others will write to where ``p.grad`` is.
        """
        self.send_all()
        self._presence = Presence(self._own_present, self._plan.compared, self._transport)
        self.hyperparameters, self.loss_scale, self.num_updates = current(optimizer), loss_scale, num_updates
        if self._plan.predicts:
            self._keep_own(grad_is_reused)
        if self._plan.keeps_weights:
            self._weights = self._plan.take_buffers()
            for bucket, members in zip(self._weights, self._plan.buckets, strict=True):
                bucket.pack([member.tensor for member in members])

    def send_all(self) -> None:
        """Sends all segments that have not been sent."""
        while self._num_sent < len(self._buffers):
            self._send_next()
        self._queue.flush()

    def settle(self) -> None:
        """Waits until it is averaged (Algorithm 1, line 3); a collective call.

        Raises:
            RuntimeError: a peer is lost.
        """
        for handle in self._handles:
            handle.wait()
        if self._presence is not None:
            self._plan.compared = self._presence.settle()
            self._present = self._plan.compared[1]
            self._presence = None

    @torch.no_grad()
    def install(self, optimizer: Optimizer, loss_scale: float) -> None:
        """Has ``p.grad`` be the average, too large by ``loss_scale``; it is None where no rank had a gradient."""
        if loss_scale != self.loss_scale:
            for bucket in self._buffers:
                bucket.flat.mul_(loss_scale / self.loss_scale)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._plan.place:  # it has joined since
                    parameter.grad = None
        for member, view, present in zip(self._plan.members, _views(self._buffers), self._present, strict=True):
            member.tensor.grad = view if present else None

    @property
    def own_is_finite(self) -> bool:
        """Whether all values of :attr:`own` are; if not, the average is not finite either, and makes no sane update."""
        return math.isfinite(self._own_norm.item())

    def own_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns, for each of the parameters of which :attr:`own` has values, what holds them in its ``grad``."""
        found = [self.own.get(id(parameter)) for parameter in parameters]
        gradients = [gradient for gradient in found if gradient is not None]
        holders = [gradient.detach() for gradient in gradients]
        for holder, gradient in zip(holders, gradients, strict=True):
            holder.grad = gradient
        return holders

    def is_shown(self) -> bool:
        """Returns whether some ``p.grad`` is still a view of its buffers, since :meth:`install`."""
        pairs = zip([member.tensor.grad for member in self._plan.members], _views(self._buffers), strict=True)
        return any(gradient is not None and gradient.data_ptr() == view.data_ptr() for gradient, view in pairs)

    def is_finite(self) -> bool:
        """Returns whether all values are."""
        return all(bool(torch.isfinite(bucket.flat).all()) for bucket in self._buffers)

    @torch.no_grad()
    def squared_distance(self) -> float:
        """Returns by how much the weights have moved since it was computed: the squared L2 norm of the difference."""
        assert self._weights is not None
        pairs = zip(self._plan.members, _views(self._weights), strict=True)
        moved = [member.tensor - view for member, view in pairs]
        return float(torch.stack(foreach_norm(moved)).square().sum())

    def release(self) -> None:
        """Has the buffers used again."""
        self._plan.give_buffers(self._buffers)
        if self._weights is not None:
            self._plan.give_buffers(self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns the average on rank 0, with what belongs to it; elsewhere the latter only. A collective call."""
        self.settle()
        return {
            "hyperparameters": self.hyperparameters,
            "loss_scale": self.loss_scale,
            "num_updates": self.num_updates,
            "present": dict(zip([member.name for member in self._plan.members], self._present, strict=True)),
            "gradients": self._by_name(self._buffers),
            "weights": self._by_name(self._weights),
            "own": self._own_by_name(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Becomes what :meth:`state_dict` returned, for the parameters that were there; a collective call."""
        names = [member.name for member in self._plan.members]
        self.hyperparameters, self.loss_scale = state["hyperparameters"], state["loss_scale"]
        self.num_updates = state["num_updates"]
        self._present = [state["present"].get(name, False) for name in names]
        self._load(self._buffers, state["gradients"])
        self._load_own(state["own"])
        if self._plan.keeps_weights:
            self._weights = self._plan.take_buffers()
            self._load(self._weights, state["weights"])

    def _keep_own(self, grad_is_reused: bool) -> None:
        """Keeps the gradients that autograd has made, which nobody else needs when they are packed."""
        pairs = [(id(m.tensor), m.tensor.grad.detach()) for m in self._plan.members if m.tensor.grad is not None]
        if not self._plan.keeps_own:
            self.own = dict.fromkeys([key for key, _ in pairs])
            return
        gradients = [gradient.clone() if grad_is_reused else gradient for _, gradient in pairs]
        if self.loss_scale != 1.0:
            foreach_mul_(gradients, 1 / self.loss_scale)
        self._take_own(dict(zip([key for key, _ in pairs], gradients, strict=True)))

    def _take_own(self, gradients: dict[int, Tensor]) -> None:
        self.own = {**gradients}
        self._own_norm = SquaredNorm(list(gradients.values()))

    def _own_by_name(self) -> dict[str, Tensor | None]:
        """Returns :attr:`own` by name, on the CPU; without the values if a checkpoint has none."""
        found: dict[str, Tensor | None] = {}
        for member in self._plan.members:
            if id(member.tensor) in self.own:
                gradient = self.own[id(member.tensor)]
                saved = gradient is not None and self._plan.saves_own
                found[member.name] = gradient.to("cpu", copy=True) if saved and gradient is not None else None
        return found

    def _load_own(self, own: dict[str, Tensor | None]) -> None:
        """Takes over what :meth:`_own_by_name` returned; the average serves for what was not saved."""
        members = [m for m in self._plan.members if m.name in own]
        if not self._plan.keeps_own:
            self.own = dict.fromkeys([id(member.tensor) for member in members])
            return
        averages = dict(zip([m.name for m in self._plan.members], _views(self._buffers), strict=True))
        gradients = {}
        for member in members:
            values = own[member.name]
            average = averages[member.name] / self.loss_scale
            gradients[id(member.tensor)] = average if values is None else values.to(average.device, copy=True)
        self._take_own(gradients)

    @torch.no_grad()
    def _send_next(self) -> None:
        index, self._num_sent = self._num_sent, self._num_sent + 1
        bucket, members = self._buffers[index], self._plan.buckets[index]
        self._own_present += bucket.pack_gradients([member.tensor for member in members])
        for piece, feedback in zip(self._plan.pieces(bucket), self._plan.feedback[index], strict=True):
            start = partial(self._transport.all_reduce, piece, codec=self._plan.codec, mean=True, feedback=feedback)
            self._handles.append(self._queue.submit("all_reduce", start))

    def _by_name(self, buffers: list[Bucket] | None) -> dict[str, Tensor] | None:
        if buffers is None or self._transport.rank != 0:
            return None
        pairs = zip(self._plan.members, _views(buffers), strict=True)
        return {member.name: view.detach().to("cpu", copy=True) for member, view in pairs}

    def _load(self, buffers: list[Bucket], values: dict[str, Tensor] | None) -> None:
        for bucket, members in zip(buffers, self._plan.buckets, strict=True):
            for view, member in zip(bucket.views, members, strict=True):
                if values is not None and member.name in values:
                    view.copy_(values[member.name])
            self._transport.broadcast(bucket.flat).wait()


def _views(buffers: Sequence[Bucket]) -> list[Tensor]:
    return [view for bucket in buffers for view in bucket.views]


def _segments(parameters: Sequence[NamedParameter], number: int) -> list[list[NamedParameter]]:
    """Divides parameters into at most ``number`` segments of about the same size."""
    total, passed = sum(num_bytes(parameter) for parameter in parameters), 0
    segments: list[list[NamedParameter]] = []
    for parameter in parameters:
        size = num_bytes(parameter)
        if passed + size / 2 >= total * len(segments) / number:  # most of it is beyond the segments so far
            segments.append([])
        segments[-1].append(parameter)
        passed += size
    return segments
