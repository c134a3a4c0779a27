"""The weights of a bucket: this rank's, their average, and the global ones with the outer step (DiLoCo, SlowMo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket, shaped
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.torch_private import foreach_add_, foreach_copy_, foreach_lerp_, map_tensors
from lightning_pipesync.methods.replicas.groups import average_among, replicas_of
from lightning_pipesync.methods.replicas.settings import MakeOptimizer, ReplicaSettings


@dataclass(frozen=True)
class _Before:
    """A rank's shard of the global values, and its outer state, before an outer step.

    Copied when the average starts, on the thread and stream of the training: on a GPU the outer step runs on another.
    """

    shard: Tensor
    outer_state: Any


class Weights:
    """The weights of one bucket, of which each rank trains its own replica.

    The global values are those that all ranks had after the last average. Lossy codecs encode the difference to them,
    never the weights themselves, and the outer step needs the same difference: the outer gradient is the global weights
    minus the average of the replicas (DiLoCo, arXiv 2311.08105, Algorithm 1, lines 12 to 14), so that SGD with a
    learning rate of 1 sets the global weights to that average. Without either, the average itself is enough.

    Each rank takes the outer step on its shard of the average, before it is gathered. If the codec's wires are gathered
    (:attr:`Codec.gathered`), each rank has all of the average, and takes all of the step.

    After its first average a bucket has memory only while one is under way, or swapped in.

    Args:
        tensors: floating-point, of one dtype on one device, the same on all ranks.
        outer: makes the optimizer of the global values; None: they become the average.
        elastic_force: if not 0, the global values do not replace a rank's, but attract them by this share of their
            distance (EASGD).

    Attributes:
        global_flat: the global values, fused; None: they are not kept.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        transport: Transport,
        config: ReplicaSettings,
        outer: MakeOptimizer | None,
        elastic_force: float,
    ) -> None:
        self.tensors = tensors
        self._config, self._transport, self._replicas = config, transport, replicas_of(transport)
        codec, error_feedback = config.codec_of_weights
        self._codec, self._elastic_force = get_codec(codec), elastic_force
        self._kept: Bucket | None = None  # this rank's values, while the average is swapped in
        self._swapped_in: list[Tensor] | None = None  # the average, or the global values, while they are
        self._sends_differences = outer is not None or not self._codec.lossless
        self._before: _Before | None = None  # of an average under way
        self._feedback: ErrorFeedback | None = None
        self.global_flat: Tensor | None = None
        if self._sends_differences or config.undoes_averages:
            self.global_flat = torch.zeros_like(self._buffer.flat)
            self._own = self.global_flat if self._codec.gathered else self._replicas.shard(self.global_flat)
            if error_feedback:
                sums = self._replicas.encodes_sums(self._codec)
                self._feedback = self._replicas.feedback(self._buffer.flat, gathered=sums)
        self._outer = outer([self._own]) if outer else None

    @cached_property
    def _buffer(self) -> Bucket:
        return Bucket(self.tensors, self._transport.world_size)

    @property
    def has_outer_shard(self) -> bool:
        """Whether each rank has the outer state of its own shard."""
        return self._outer is not None and not self._codec.gathered

    def packed(self) -> Tensor:
        """Returns the tensors, fused, in the buffer that the next average uses."""
        self._buffer.take_memory()
        self._buffer.pack(self.tensors)
        return self._buffer.flat

    @property
    def result(self) -> Tensor:
        """The buffer of the average between :meth:`start` and :meth:`finish`."""
        self._buffer.take_memory()
        return self._buffer.flat

    def unpack(self) -> None:
        """Sets the tensors to the values in the buffer."""
        self._buffer.unpack(self.tensors)

    # --- the global values ------------------------------------------------------------------------------------------

    def set_global(self) -> None:
        """Sets the global values to the present ones, which are the same on all ranks."""
        if self.global_flat is not None:
            self.global_flat.copy_(self.packed())
            self._buffer.release_memory()

    def drop_residuals(self) -> None:
        """Forgets what was not sent of the weights before others were loaded."""
        if self._feedback is not None:
            self._feedback.decay(0.0)

    @torch.no_grad()
    def update_global(self) -> None:
        """Sets the global values to the average, which has arrived; with a lossy codec that is a difference so far."""
        self._before = None
        if self.global_flat is None:
            return
        flat = self._buffer.flat
        if self._codec.lossless:
            self.global_flat.copy_(flat)
        elif self._outer and self._codec.gathered:
            flat.copy_(self._outer_values(flat))
        else:
            flat.copy_(self.global_flat.add_(flat))

    def _agreed(self) -> Tensor:
        """Returns a copy of the values that all ranks agree on: not what an average under way has changed."""
        assert self.global_flat is not None
        if self._before is None:
            return self.global_flat.clone()
        begin = int(self._own.storage_offset() - self.global_flat.storage_offset())
        end = begin + self._own.numel()
        return torch.cat([self.global_flat[:begin], self._before.shard, self.global_flat[end:]])

    def _outer_values(self, movement: Tensor) -> Tensor:
        """Takes the outer step on this rank's shard of the global values, and returns it.

        ``movement`` is the average minus these values, and is not to be used afterwards.
        """
        assert self._outer is not None
        self._own.grad = movement.neg_()
        self._outer.step()
        self._own.grad = None
        return self._own

    def _outer_state(self) -> Any:
        assert self._outer is not None
        return self._outer.state_dict()["state"]

    def _shard_hook(self, count: int | None) -> Callable[[Tensor], object] | None:
        """Returns what changes this rank's shard of the average, or of a sum that ``count`` divides, as it starts."""
        if self._codec.gathered or not (self._outer or count):
            return None
        if not self._outer:
            return partial(self._outer_step, count, None)
        self._before = _Before(self._own.clone(), map_tensors(Tensor.clone, self._outer_state()))
        return partial(self._outer_step, count, self._before.shard)

    @torch.no_grad()
    def _outer_step(self, count: int | None, before: Tensor | None, shard: Tensor) -> None:
        """Replaces this rank's shard of a sum by what all ranks gather: values, or with a lossy codec a difference.

        ``before`` has the global values of the shard, with an outer step.
        """
        if count is not None:
            shard.div_(count)
        if self._outer is None or before is None:
            return
        stepped = self._outer_values(shard.to(self._own.device))
        if self._codec.lossless:
            shard.copy_(stepped)
        else:  # all ranks, this one too, add the decoded difference to the global weights
            difference = stepped - before
            self._own.copy_(before)
            shard.copy_(difference)  # last: the copy may make the host wait

    # --- an average -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, participants: Sequence[int] | None = None, background: bool = False) -> Handle[Tensor]:
        """Starts to average over ``participants``, or all replicas; :meth:`finish` ends it; collective.

        They are the same on all ranks, and all get the average, or, with neighbors, this replica and its own.
        """
        flat = self.packed()
        if self._config.neighbors != "all":
            assert participants is not None  # with nobody the average would be this rank's own values
            return average_among(self._replicas, flat, participants, background)
        if self._config.average == "server":
            return self._replicas.average_at(flat, background=background)
        if self.global_flat is not None and self._sends_differences:
            flat.sub_(self.global_flat)
        if self._elastic_force:
            foreach_add_(self.tensors, self._buffer.views, alpha=-self._elastic_force)
        if participants is not None and self._replicas.rank not in participants:
            flat.zero_()
        if self._feedback is not None:
            self._feedback.decay(self._config.decay_of_residuals)
        return self._replicas.all_reduce(
            flat,
            codec=self._codec,
            mean=participants is None,
            feedback=self._feedback,
            shard_hook=self._shard_hook(None if participants is None else len(participants)),
            background=background,
        )

    def finish(self, _: object = None) -> None:
        """Updates the global values by the average, which has arrived, and applies it."""
        self.update_global()
        self.apply()

    @torch.no_grad()
    def apply(self, mixing_factor: float = 0.0) -> None:
        """Sets the tensors to the average, but for ``mixing_factor`` of their values."""
        if self._elastic_force:
            pass  # :meth:`start` has moved them
        elif mixing_factor:
            foreach_lerp_(self.tensors, self._buffer.views, 1 - mixing_factor)
        else:
            self.unpack()
        self._buffer.release_memory()

    @torch.no_grad()
    def add_progress(self, before: Tensor) -> None:
        """Sets the tensors to the average plus their progress since it started, when they were ``before``.

        ``before`` is fused, and on the CPU after a resume.
        """
        if not self._elastic_force:
            self._buffer.flat.sub_(before.to(self._buffer.flat.device))
            foreach_add_(self.tensors, self._buffer.views, alpha=1)
        self._buffer.release_memory()

    # --- other values in their place --------------------------------------------------------------------------------

    @property
    def is_swapped(self) -> bool:
        return self._swapped_in is not None

    def keep_present(self) -> None:
        """Keeps this rank's values for :meth:`swap_back`."""
        self._kept = self._kept or Bucket(self.tensors)
        self._kept.pack(self.tensors)

    def average_is_swapped_in(self) -> None:
        """Notes that the average, in the buffer, has replaced the values that :meth:`keep_present` has kept."""
        self._swapped_in = self._buffer.views

    @torch.no_grad()
    def swap_in_global(self) -> None:
        """Sets the tensors to the global values that all ranks agree on, and keeps this rank's."""
        self.keep_present()
        flat = self._agreed()
        self._swapped_in = [shaped(flat[p], like=t) for p, t in zip(self._buffer.places, self.tensors, strict=True)]
        foreach_copy_(self.tensors, self._swapped_in)

    def swap_back(self) -> None:
        """Restores this rank's values, except those of tensors that were written to since the swap."""
        if self._swapped_in is not None and self._kept is not None:
            restore_unwritten(self.tensors, self._swapped_in, self._kept.views)
        self.keep_average()

    def keep_average(self) -> None:
        """Drops the values that were kept for :meth:`swap_back`."""
        if self._swapped_in is not None and self._swapped_in is self._buffer.views:
            self._buffer.release_memory()
        self._swapped_in = self._kept = None

    def is_written(self) -> bool:
        """Returns whether tensors were written to since the swap."""
        return self._swapped_in is not None and any(differing(self.tensors, self._swapped_in))

    @torch.no_grad()
    def move_as_swapped(self, before: Tensor) -> None:
        """Adds to ``before``, fused values, what the swap has changed; they may be on the CPU."""
        if self._swapped_in is not None and self._kept is not None:
            for place, now, kept in zip(self._buffer.places, self._swapped_in, self._kept.views, strict=True):
                shaped(before[place], like=kept).add_((now - kept).to(before.device))

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self, own: bool = True, residuals: bool = False) -> dict[str, Any]:
        """Returns, on the CPU, global values and outer state that all ranks agree on; not a collective call.

        Args:
            own: whether with this rank's values.
            residuals: whether with those of the codec.
        """
        state: dict[str, Any] = {}
        if own:
            state["own"] = to_cpu(self.tensors if self._kept is None or not self.is_swapped else self._kept.views)
        if self.global_flat is not None:
            state["global"] = self._agreed().cpu()
        if self._outer is not None:
            outer = self._outer_state() if self._before is None else self._before.outer_state
            state["outer"] = map_tensors(lambda tensor: tensor.to("cpu", copy=True), outer)
        if residuals and self._feedback is not None:
            state["feedback"] = self._feedback.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "own" in state:
            foreach_copy_(self.tensors, state["own"])
        if self.global_flat is not None and "global" in state:
            self._before = None
            self.global_flat.copy_(state["global"])
            if self._outer is not None:
                groups = self._outer.state_dict()["param_groups"]
                self._outer.load_state_dict({"state": state["outer"], "param_groups": groups})
            if self._feedback is not None and "feedback" in state:
                self._feedback.load_state_dict(state["feedback"])


@torch.no_grad()
def restore_unwritten(tensors: Sequence[Tensor], average: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Restores the ``kept`` values of tensors that nobody has written to: they still equal ``average``."""
    for tensor, value, written in zip(tensors, kept, differing(tensors, average), strict=True):
        if not written:
            tensor.copy_(value)


def differing(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Returns for each pair of tensors whether their shapes or bits differ; a NaN equals itself.

    The tensors of a pair are on one device, those of another pair may be on another.
    """
    if not tensors:
        return []
    differ = [
        (_bits(tensor) != _bits(other)).any()
        if tensor.shape == other.shape
        else torch.ones((), dtype=torch.bool, device=tensor.device)
        for tensor, other in zip(tensors, others, strict=True)
    ]
    device = next((each.device for each in differ if each.is_cuda), differ[0].device)
    result: list[bool] = torch.stack([each.to(device) for each in differ]).tolist()  # waits for the device once
    return result


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
