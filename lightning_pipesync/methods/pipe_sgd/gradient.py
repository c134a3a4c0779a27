"""The gradient of one step, from its backward pass to its update k steps later, and how it is fused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import MIB, Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter, SquaredNorm
from lightning_pipesync.core.sharding import copies_of, count_copies
from lightning_pipesync.core.torch_private import foreach_mul_
from lightning_pipesync.methods.gradients.bucket import GradientBucket, GradientBuckets
from lightning_pipesync.methods.gradients.low_rank import low_rank_gradients
from lightning_pipesync.methods.hyperparameters import Hyperparameters, current
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.replicas.flags import check_same

# Bits of a rank's flag: it has another mask than that of the last comparison; it has skipped an even or an odd number
# of steps, of which one is set in every flag; an optimizer has other parameters, and the gradient follows this flag.
DIFFERS, SKIPPED, NEW_PARAMETERS = 1, (2, 4), 8

#: Bytes of a piece that each rank sums: so much that messages are large, and so little that one half of an all-reduce
#: of a large buffer overlaps with the other half.
SHARD_OF_PIECE = 4 * MIB


class GradientLayout(GradientBuckets):
    """How the gradients of some parameters are fused, step after step.

    ``members`` are these, bucket by bucket, in the order in which their gradients are expected. ``compared`` is, by
    member, whether it had a gradient when the ranks last compared: on this rank, on any.
    """

    def __init__(self, parameters: Sequence[NamedParameter], config: PipeSGDConfig, transport: Transport) -> None:
        self.config, self.transport = config, transport
        ready_order = [replace(parameter, group=None) for parameter in reversed(parameters)]
        if config.pipeline_level == 1:
            plan = plan_buckets(ready_order, Fusion(bucket_mb=config.bucket_mb or math.inf))
        else:
            segments = _segments(ready_order, config.segments)
            plan = [bucket for part in segments for bucket in plan_buckets(part, Fusion(bucket_mb=math.inf))]
        self.members = [member for members in plan for member in members]
        self.compared = [True] * len(parameters), [True] * len(parameters)
        tensors = [[member.tensor for member in members] for members in plan]
        low_rank = low_rank_gradients(parameters, config)
        feedback = config.uses_error_feedback
        super().__init__(tensors, transport, config.compression, feedback, low_rank, SHARD_OF_PIECE)
        self._free = [self.buckets]

    def acquire_buckets(self) -> list[GradientBucket]:
        """Returns a bucket for each part, with undefined content."""
        return self._free.pop() if self._free else [bucket.twin() for bucket in self.buckets]

    def release_buckets(self, buckets: list[GradientBucket]) -> None:
        self._free.append(buckets)


class GradientInFlight:
    """The gradient of one step, which is averaged over the ranks while the next steps run.

    Most models use the same parameters at every step. So each rank sends one byte with the gradient: whether the mask
    of its parameters that have one differs from that of the last comparison. Ranks compare masks only if one differs.
    The byte also says whether the rank has skipped as many steps as the others, so that they average the same step's.

    ``own`` is what this rank has computed, unscaled, with which weights are predicted until the average is applied: by
    the id of a parameter; None for zeros, as with ``delay_compensation="momentum"``. Empty if it predicts nothing.
    """

    hyperparameters: Hyperparameters  # of the optimizer when it was computed
    loss_scale: float  # by which it is too large
    num_updates: int  # that had been made when it was computed
    _optimizer: str  # its name

    def __init__(self, layout: GradientLayout) -> None:
        self._layout, self._transport = layout, layout.transport
        self.buckets = layout.acquire_buckets()
        self._weights: list[GradientBucket] | None = None
        self._compared = layout.compared
        self._flags: Handle[list[int]] | None = None  # of all ranks
        self._present: list[bool] = []  # by parameter: on this rank, and on any once that is known
        self.own: dict[int, Tensor | None] = {}
        self._own_norm = SquaredNorm([])

    @torch.no_grad()
    def submit(
        self, optimizer: Optimizer, loss_scale: float, num_updates: int, num_skipped: int, grad_is_reused: bool
    ) -> None:
        """Keeps what the update will need, once the all-reduces have started (Algorithm 1, lines 9 and 10).

        ``num_skipped``: steps that were skipped before. ``grad_is_reused``: whether the memory of ``p.grad`` will be
        written to.
        """
        self._present = [present for bucket in self.buckets for present in bucket.present]
        self._compared = self._layout.compared
        flag = DIFFERS * (self._present != self._compared[0]) | SKIPPED[num_skipped % 2]
        self._flags, self._optimizer = self._transport.exchange_flags(flag), type(optimizer).__name__
        self.hyperparameters, self.loss_scale, self.num_updates = current(optimizer), loss_scale, num_updates
        if self._layout.config.predicts:
            self._keep_own(grad_is_reused)
        if self._keeps_weights:
            self._weights = self._layout.acquire_buckets()
            for bucket in self._weights:
                bucket.gradients.pack(bucket.parameters)

    def wait(self) -> None:
        """Waits until it is averaged (Algorithm 1, line 3); a collective call.

        Raises:
            RuntimeError: on all ranks: it is of another step on some rank, which has not skipped what others have.
            ValueError: some rank has added parameters to an optimizer.
        """
        flags: list[int] = [] if self._flags is None else self._flags.wait()
        if flags:  # which arrive also if some rank does not take part in the rest
            check_new_parameters(flags, self._transport.ranks)
            check_same(
                flags,
                f"have not skipped the same steps of {self._optimizer}. Once its gradient was reduced, by clipping it "
                "or by reduce(), all ranks take the step; or none, and all have a backward pass before the next one.",
                mask=sum(SKIPPED),
                ranks=self._transport.ranks,
            )
        for bucket in self.buckets:
            bucket.wait()
        if flags:
            if any(flag & DIFFERS for flag in flags):
                self._compared = self._present, self._transport.union(self._present).wait()
            self._layout.compared, self._flags = self._compared, None
            self._present = self._compared[1]

    @torch.no_grad()
    def set_gradients(self, optimizer: Optimizer, loss_scale: float) -> None:
        """Sets ``p.grad`` to the average, too large by ``loss_scale``; to None where no rank had a gradient."""
        if loss_scale != self.loss_scale:
            for bucket in self.buckets:
                bucket.gradients.flat.mul_(loss_scale / self.loss_scale)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._layout.index_of:  # it has joined since
                    parameter.grad = None
        for member, view, present in zip(self._layout.members, _views(self.buckets), self._present, strict=True):
            member.tensor.grad = view if present else None

    def is_in_grad(self) -> bool:
        """Returns whether some ``p.grad`` is still a view of its buffers, since :meth:`set_gradients`."""
        pairs = zip([member.tensor.grad for member in self._layout.members], _views(self.buckets), strict=True)
        return any(gradient is not None and gradient.data_ptr() == view.data_ptr() for gradient, view in pairs)

    @property
    def own_is_finite(self) -> bool:
        """Whether all values of ``own`` are finite. Otherwise the average is not either, and predicts nothing."""
        return math.isfinite(self._own_norm.item())

    def own_holders(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors whose ``grad`` is in ``own``, for each of ``parameters`` that has values there."""
        holders = []
        for parameter in parameters:
            if (gradient := self.own.get(id(parameter))) is not None:
                holder = gradient.detach()
                holder.grad = gradient
                count_copies(holder, copies_of(parameter))
                holders.append(holder)
        return holders

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(bucket.gradients.flat).all()) for bucket in self.buckets)

    @torch.no_grad()
    def squared_distance(self) -> float:
        """Returns the squared L2 norm of the difference between the weights now and when it was computed."""
        assert self._weights is not None
        pairs = zip(self._layout.members, _views(self._weights), strict=True)
        moved = [member.tensor - view for member, view in pairs]
        copies = [copies_of(member.tensor) for member in self._layout.members]
        return self._transport.sum_over_shards(SquaredNorm(moved, copies).item())

    def release(self) -> None:
        """Releases its buckets for later gradients."""
        self._layout.release_buckets(self.buckets)
        if self._weights is not None:
            self._layout.release_buckets(self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, with the averages on rank 0 only; a collective call."""
        self.wait()
        return {
            "hyperparameters": self.hyperparameters,
            "loss_scale": self.loss_scale,
            "num_updates": self.num_updates,
            "present": dict(zip([member.name for member in self._layout.members], self._present, strict=True)),
            "gradients": self._by_name(self.buckets),
            "weights": self._by_name(self._weights),
            "own": self._saved_own(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned, for the parameters that it has; a collective call."""
        names = [member.name for member in self._layout.members]
        self.hyperparameters, self.loss_scale = state["hyperparameters"], state["loss_scale"]
        self.num_updates = state["num_updates"]
        self._present = [state["present"].get(name, False) for name in names]
        self._load(self.buckets, state["gradients"])
        self._load_own(state["own"])
        if self._keeps_weights:
            self._weights = self._layout.acquire_buckets()
            self._load(self._weights, state["weights"])

    def _keep_own(self, grad_is_reused: bool) -> None:
        """Takes ``p.grad``, ``loss_scale`` times too large; copies it only if its memory will be written to."""
        pairs = [(id(m.tensor), m.tensor.grad.detach()) for m in self._layout.members if m.tensor.grad is not None]
        gradients = [gradient for _, gradient in pairs]
        if self._layout.config.keeps_local_gradients:
            if grad_is_reused:
                gradients = [gradient.clone() for gradient in gradients]
            if self.loss_scale != 1.0:
                foreach_mul_(gradients, 1 / self.loss_scale)
        self._set_own(dict(zip([key for key, _ in pairs], gradients, strict=True)))

    def _set_own(self, gradients: dict[int, Tensor]) -> None:
        if self._layout.config.keeps_local_gradients:
            self.own, self._own_norm = {**gradients}, SquaredNorm(list(gradients.values()))
        else:
            self.own = dict.fromkeys(gradients)

    def _saved_own(self) -> dict[str, Tensor | None]:
        """Returns ``own`` by name, on the CPU; None for zeros, and with ``checkpoint_own_gradients=False``."""
        state: dict[str, Tensor | None] = {}
        for member in self._layout.members:
            if id(member.tensor) in self.own:
                gradient = self.own[id(member.tensor)] if self._layout.config.checkpoint_own_gradients else None
                state[member.name] = None if gradient is None else gradient.to("cpu", copy=True)
        return state

    def _load_own(self, state: Mapping[str, Tensor | None]) -> None:
        """Loads what was saved; values that were not become those of the averages."""
        gradients = {}
        for member, view in zip(self._layout.members, _views(self.buckets), strict=True):
            if member.name in state:
                values = state[member.name]
                loaded = view / self.loss_scale if values is None else values.to(view.device, copy=True)
                gradients[id(member.tensor)] = loaded
        self._set_own(gradients)

    @property
    def _keeps_weights(self) -> bool:
        return self._layout.config.delay_compensation == "distance"

    def _by_name(self, buckets: list[GradientBucket] | None) -> dict[str, Tensor] | None:
        if buckets is None or self._transport.rank != 0:
            return None
        pairs = zip(self._layout.members, _views(buckets), strict=True)
        return {member.name: view.detach().to("cpu", copy=True) for member, view in pairs}

    def _load(self, buckets: list[GradientBucket], values: dict[str, Tensor] | None) -> None:
        for view, member in zip(_views(buckets), self._layout.members, strict=True):
            if values is not None and member.name in values:
                view.copy_(values[member.name])
        with self._transport.traffic.beside_steps():
            for bucket in buckets:
                self._transport.broadcast(bucket.gradients.flat).wait()


def check_new_parameters(flags: Sequence[int], ranks: Sequence[int]) -> bool:
    """Returns whether all ranks have new parameters.

    Raises:
        ValueError: only some have.
    """
    by_rank = list(zip(ranks, flags, strict=True))
    new = [str(rank) for rank, flag in by_rank if flag & NEW_PARAMETERS]
    others = [str(rank) for rank, flag in by_rank if not flag & NEW_PARAMETERS]
    if new and others:
        raise ValueError(
            f"The optimizers have other parameters than before on rank {', '.join(new)}, and not on rank "
            f"{', '.join(others)}: add parameters to the optimizers of all ranks alike, before the same step."
        )
    return bool(new)


def _views(buckets: Sequence[GradientBucket]) -> list[Tensor]:
    return [view for bucket in buckets for view in bucket.gradients.views]


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
