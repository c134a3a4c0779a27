"""The gradient of one step, from its backward pass to its update k steps later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.torch_private import foreach_norm
from lightning_pipesync.methods.gradients.hyperparameters import Hyperparameters, current
from lightning_pipesync.methods.pipe_sgd.gradient_plan import GradientPlan
from lightning_pipesync.methods.pipe_sgd.own_gradient import OwnGradient


class GradientMask:
    """Which parameters have a gradient in one step, on this rank and on any rank.

    Most models use the same parameters at every step. So each rank sends one byte with the gradient: whether its mask
    differs from that of the last comparison. Ranks compare masks again only if one differs.

    Args:
        own: for each parameter, whether this rank has a gradient.
        compared: the masks of the last comparison: of this rank, and of any.
        transport: the way to the other ranks.
    """

    def __init__(self, own: Sequence[bool], compared: tuple[list[bool], list[bool]], transport: Transport) -> None:
        self._own, self._compared, self._transport = list(own), compared, transport
        self._flags: Handle[list[int]] = transport.exchange_flags(self._own != compared[0])

    def wait(self) -> tuple[list[bool], list[bool]]:
        """Returns the mask of this rank, and that of any rank; a collective call."""
        if any(self._flags.wait()):
            return self._own, self._transport.union(self._own).wait()
        return self._compared


class GradientInFlight:
    """The gradient of one step, which is averaged over the ranks while the next steps run.

    Args:
        plan: how it is fused.
        queue: runs its all-reduces (Algorithm 1, communication thread).
        transport: the way to the other ranks.

    Attributes:
        hyperparameters: of the optimizer when it was computed.
        loss_scale: by which it is too large.
        num_updates: how many updates had been made when it was computed.
        own: this rank's part of it.
    """

    hyperparameters: Hyperparameters
    loss_scale: float
    num_updates: int

    def __init__(self, plan: GradientPlan, queue: CommQueue, transport: Transport) -> None:
        self._plan, self._queue, self._transport = plan, queue, transport
        self._buffers = plan.acquire_buffers()
        self._weights: list[Bucket] | None = None
        self._awaited = [sum(member.tensor.requires_grad for member in members) for members in plan.buckets]
        self._ready: set[int] = set()
        self._handles: list[Handle[Tensor]] = []
        self._num_sent = 0  # buckets
        self._own_present: list[bool] = []
        self._mask: GradientMask | None = None
        self._present: list[bool] = []
        self.own = OwnGradient(plan.members, plan.config)

    def is_ready(self, parameter: Tensor) -> None:
        """Starts the all-reduce of the segments that are complete (Fig. 7), now that this parameter's gradient is.

        Raises:
            RuntimeError: it was complete before.
        """
        if id(parameter) in self._ready or self._plan.place[id(parameter)] < self._num_sent:
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
    def start(self, optimizer: Optimizer, loss_scale: float, num_updates: int, grad_is_reused: bool) -> None:
        """Starts the all-reduce of all segments (Algorithm 1, computation thread, lines 9 and 10).

        Args:
            optimizer: whose gradient it is.
            loss_scale: by which it is too large.
            num_updates: updates that have been made so far.
            grad_is_reused: whether the memory of ``p.grad`` will be written to.
        """
        self.send_all()
        self._mask = GradientMask(self._own_present, self._plan.compared, self._transport)
        self.hyperparameters, self.loss_scale, self.num_updates = current(optimizer), loss_scale, num_updates
        if self._plan.config.predicts:
            self.own.keep(loss_scale, grad_is_reused)
        if self._keeps_weights:
            self._weights = self._plan.acquire_buffers()
            for bucket, members in zip(self._weights, self._plan.buckets, strict=True):
                bucket.pack([member.tensor for member in members])

    def send_all(self) -> None:
        """Starts the all-reduce of all segments whose all-reduce has not started."""
        while self._num_sent < len(self._buffers):
            self._send_next()
        self._queue.flush()

    def wait(self) -> None:
        """Waits until it is averaged (Algorithm 1, line 3); a collective call.

        Raises:
            RuntimeError: a peer is lost.
        """
        for handle in self._handles:
            handle.wait()
        if self._mask is not None:
            self._plan.compared = self._mask.wait()
            self._present = self._plan.compared[1]
            self._mask = None

    @torch.no_grad()
    def set_gradients(self, optimizer: Optimizer, loss_scale: float) -> None:
        """Sets ``p.grad`` to the average, too large by ``loss_scale``; to None where no rank had a gradient."""
        if loss_scale != self.loss_scale:
            for bucket in self._buffers:
                bucket.flat.mul_(loss_scale / self.loss_scale)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._plan.place:  # it has joined since
                    parameter.grad = None
        for member, view, present in zip(self._plan.members, _views(self._buffers), self._present, strict=True):
            member.tensor.grad = view if present else None

    def is_in_grad(self) -> bool:
        """Returns whether some ``p.grad`` is still a view of its buffers, since :meth:`set_gradients`."""
        pairs = zip([member.tensor.grad for member in self._plan.members], _views(self._buffers), strict=True)
        return any(gradient is not None and gradient.data_ptr() == view.data_ptr() for gradient, view in pairs)

    def is_finite(self) -> bool:
        """Returns whether all values are."""
        return all(bool(torch.isfinite(bucket.flat).all()) for bucket in self._buffers)

    @torch.no_grad()
    def squared_distance(self) -> float:
        """Returns the squared L2 norm of the difference between the weights now and when it was computed."""
        assert self._weights is not None
        pairs = zip(self._plan.members, _views(self._weights), strict=True)
        moved = [member.tensor - view for member, view in pairs]
        return float(torch.stack(foreach_norm(moved)).square().sum())

    def release(self) -> None:
        """Releases its buffers for later gradients."""
        self._plan.release_buffers(self._buffers)
        if self._weights is not None:
            self._plan.release_buffers(self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, with the averages on rank 0 only; a collective call."""
        self.wait()
        return {
            "hyperparameters": self.hyperparameters,
            "loss_scale": self.loss_scale,
            "num_updates": self.num_updates,
            "present": dict(zip([member.name for member in self._plan.members], self._present, strict=True)),
            "gradients": self._by_name(self._buffers),
            "weights": self._by_name(self._weights),
            "own": self.own.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned, for the parameters that it has; a collective call."""
        names = [member.name for member in self._plan.members]
        self.hyperparameters, self.loss_scale = state["hyperparameters"], state["loss_scale"]
        self.num_updates = state["num_updates"]
        self._present = [state["present"].get(name, False) for name in names]
        self._load(self._buffers, state["gradients"])
        self.own.load_state_dict(state["own"], dict(zip(names, _views(self._buffers), strict=True)), self.loss_scale)
        if self._keeps_weights:
            self._weights = self._plan.acquire_buffers()
            self._load(self._weights, state["weights"])

    @property
    def _keeps_weights(self) -> bool:
        return self._plan.config.delay_compensation == "distance"

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
