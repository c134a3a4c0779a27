"""Parameters of which each rank trains its own replica, and their average over the ranks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket, shaped
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.fingerprints import digest
from lightning_pipesync.core.torch_private import foreach_add_, foreach_copy_, foreach_lerp_
from lightning_pipesync.methods.replicas.global_weights import GlobalWeights, MakeOptimizer
from lightning_pipesync.methods.replicas.groups import ReplicaGroups, replicas_of
from lightning_pipesync.methods.replicas.neighbors import Neighbors


class ReplicatedTensors:
    """Averages tensors over the replicas, with all buckets in flight at the same time.

    After its first average a bucket has memory only while one is under way, or swapped in.

    Args:
        buckets: tensors of each bucket, floating-point, of one dtype on one device, the same on all ranks.
        outer: makes the optimizer of the global values; None: they become the average.
        elastic_force: if not 0, the global values do not replace a rank's, but attract them by this share of their
            distance (EASGD).
        keeps_global_weights: whether the global values are kept, also if the next average does not need them.
        neighbors: whose values are averaged; if not all, without a codec, and without global values.
        at_server: whether rank 0 averages them, as a parameter server; without a codec and global values.
        residual_decay: the factor on a codec's residuals from one average to the next.

    Attributes:
        global_weights: what codecs and the outer step start from.
        diverged: whether the replicas may differ, the same on all ranks; set by the owner after a local step.
    """

    def __init__(
        self,
        buckets: Sequence[list[Tensor]],
        transport: Transport,
        codec: str | Codec = "none",
        error_feedback: bool = False,
        outer: MakeOptimizer | None = None,
        elastic_force: float = 0.0,
        keeps_global_weights: bool = False,
        neighbors: Neighbors = "all",
        at_server: bool = False,
        residual_decay: float = 1.0,
    ) -> None:
        self.tensors = list(buckets)
        self._transport, self._replicas = transport, replicas_of(transport)
        self._codec = get_codec(codec)
        self._elastic_force, self._neighbors, self._at_server = elastic_force, neighbors, at_server
        self._kept: list[Bucket] = []  # this rank's values, while the average is swapped in
        self._swapped_in: list[list[Tensor]] = []  # the average, or the global values, while they are
        self.diverged = False
        are_kept = outer is not None or not self._codec.lossless or keeps_global_weights
        flats = [bucket.flat for bucket in self._buckets] if are_kept else []
        of_codec = (self._codec, error_feedback)
        self.global_weights = GlobalWeights(self._replicas, flats, *of_codec, outer, residual_decay)
        self.set_global_weights()

    @cached_property
    def _buckets(self) -> list[Bucket]:
        return [Bucket(tensors, self._transport.world_size) for tensors in self.tensors]

    def set_global_weights(self) -> None:
        """Sets the global values to the present ones, which are the same on all ranks."""
        for index, flat in enumerate(self.global_weights.flats):
            flat.copy_(self.packed(index))
            self._buckets[index].release_memory()

    def reset_global_weights(self) -> None:
        """Sets the global values to the present ones, or to their average if ranks differ; a collective call.

        What the codec had not sent of the former ones is dropped.
        """
        if not self.global_weights.flats:
            return
        self.global_weights.drop_residuals()
        if len(set(self._transport.gather_objects(digest(self.tensors)))) > 1:
            self._average_over(self._transport)
        self.set_global_weights()

    def packed(self, index: int) -> Tensor:
        """Returns the tensors of a bucket, fused, in the buffer that the next average uses."""
        bucket = self._buckets[index]
        bucket.take_memory()
        bucket.pack(self.tensors[index])
        return bucket.flat

    def result(self, index: int) -> Tensor:
        """Returns the buffer of a bucket's average between :meth:`start` and :meth:`finish`."""
        self._buckets[index].take_memory()
        return self._buckets[index].flat

    def average(self) -> None:
        """Sets the tensors to their exact average over the replicas; a collective call."""
        self._average_over(self._replicas)
        self.diverged = False

    @torch.no_grad()
    def start(self, index: int, participants: Sequence[int] | None = None, background: bool = False) -> Handle[Tensor]:
        """Starts to average a bucket over ``participants``, or all replicas; :meth:`finish` ends it; collective.

        They are the same on all ranks, and all get the average, or, with neighbors, this replica and its own.
        """
        bucket = self._buckets[index]
        if self._neighbors != "all":
            assert participants is not None  # with nobody the average would be this rank's own values
            return average_among(self._replicas, self.packed(index), participants, background)
        if self._at_server:
            return self._replicas.average_at(self.packed(index), background=background)
        self.global_weights.subtract_from(index, self.packed(index))
        if self._elastic_force:
            foreach_add_(self.tensors[index], bucket.views, alpha=-self._elastic_force)
        if participants is not None and self._replicas.rank not in participants:
            bucket.flat.zero_()
        count = None if participants is None else len(participants)
        return self._replicas.all_reduce(
            bucket.flat,
            codec=self._codec,
            mean=participants is None,
            feedback=self.global_weights.feedback(index),
            shard_hook=self.global_weights.shard_hook(index, count),
            background=background,
        )

    def finish(self, index: int, _: object = None) -> None:
        """Updates the global values by a bucket's average, which has arrived, and applies it."""
        self.update_global_weights(index)
        self.apply(index)

    def update_global_weights(self, index: int) -> None:
        """Updates the global values of a bucket whose average has arrived."""
        self.global_weights.update(index, self._buckets[index].flat)

    @torch.no_grad()
    def apply(self, index: int, mixing_factor: float = 0.0) -> None:
        """Sets the tensors of a bucket to its average, but for ``mixing_factor`` of their values."""
        bucket = self._buckets[index]
        if self._elastic_force:
            pass  # :meth:`start` has moved them
        elif mixing_factor:
            foreach_lerp_(self.tensors[index], bucket.views, 1 - mixing_factor)
        else:
            bucket.unpack(self.tensors[index])
        bucket.release_memory()

    @torch.no_grad()
    def add_progress(self, index: int, before: Tensor) -> None:
        """Sets the tensors of a bucket to its average plus their progress since it started, when they were ``before``.

        ``before`` is fused, and on the CPU after a resume.
        """
        bucket = self._buckets[index]
        if not self._elastic_force:
            bucket.flat.sub_(before.to(bucket.flat.device))
            foreach_add_(self.tensors[index], bucket.views, alpha=1)
        bucket.release_memory()

    def _average_over(self, collectives: Transport | ReplicaGroups) -> None:
        handles = []
        for index in range(len(self.tensors)):
            handles.append(collectives.all_reduce(self.packed(index), mean=True))
        for handle in handles:  # all of them, or none is applied if a peer is lost
            handle.wait()
        for bucket, tensors in zip(self._buckets, self.tensors, strict=True):
            bucket.unpack(tensors)

    def swap_in_average(self) -> None:
        """Sets the tensors to their average, and keeps this rank's values for :meth:`swap_back`; collective.

        With an elastic force, sets them to the global values. Does nothing if the replicas have not diverged.
        """
        if self._swapped_in or not self.diverged:
            return
        if self._elastic_force:
            self.swap_in_global_weights()
            return
        self._keep_present()
        self.average()
        self._swapped_in = [bucket.views for bucket in self._buckets]

    @torch.no_grad()
    def swap_in_global_weights(self) -> None:
        """Sets the tensors to the global values, as :meth:`swap_in_average`; not a collective call."""
        if self._swapped_in or not self.diverged:
            return
        self._keep_present()
        for index, (bucket, tensors) in enumerate(zip(self._buckets, self.tensors, strict=True)):
            flat = self.global_weights.agreed(index)
            views = [shaped(flat[place], like=t) for place, t in zip(bucket.places, tensors, strict=True)]
            foreach_copy_(tensors, views)
            self._swapped_in.append(views)

    def swap_back(self) -> None:
        """Restores this rank's values, except those of tensors that were written to since the swap."""
        if not self._swapped_in:
            return
        for kept, average, tensors in zip(self._kept, self._swapped_in, self.tensors, strict=True):
            restore_unwritten(tensors, average, kept.views)
        self.keep_average()
        self.diverged = True

    @torch.no_grad()
    def move_as_swapped(self, index: int, before: Tensor) -> None:
        """Adds to ``before``, fused values of a bucket, what the swap has changed; they may be on the CPU."""
        if not self._swapped_in:
            return
        swapped = zip(self._buckets[index].places, self._swapped_in[index], self._kept[index].views, strict=True)
        for place, average, kept in swapped:
            shaped(before[place], like=kept).add_((average - kept).to(before.device))

    def written_since_swap(self) -> bool:
        """Returns whether tensors were written to since :meth:`swap_in_average`; True if nothing is swapped in."""
        pairs = zip(self._swapped_in, self.tensors, strict=False)
        return not self._swapped_in or any(any(differing(tensors, average)) for average, tensors in pairs)

    def keep_average(self) -> None:
        """Continues from the average, without the values that :meth:`swap_in_average` has kept."""
        for bucket, average in zip(self._buckets, self._swapped_in, strict=False):
            if average is bucket.views:
                bucket.release_memory()
        self._swapped_in = []
        self._kept.clear()

    def snapshot(self, buckets: Container[int] | None = None) -> dict[str, Any]:
        """Returns a state that undoes an average, of ``buckets``, or of all; not a collective call."""
        return {"own": self._values(buckets), "diverged": self.diverged, **self.global_weights.snapshot(buckets)}

    def completed(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Returns a snapshot with the present state of the buckets that it lacks."""
        present, completed = self.snapshot(), dict(snapshot)
        for kind in {"own", "common"} & present.keys():
            completed[kind] = _filled(snapshot[kind], present[kind])
        if present.get("outer"):
            completed["outer"] = {"states": _filled(snapshot["outer"]["states"], present["outer"]["states"])}
        return completed

    def state_dict(self) -> dict[str, Any]:
        """Returns, on the CPU, this rank's values if they may differ, and the state of the global weights."""
        own = {"own": self._values()} if self._swapped_in or self.diverged else {}
        return {**own, **self.global_weights.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what :meth:`state_dict` or :meth:`snapshot` returned on this rank."""
        self.diverged = state.get("diverged", "own" in state)
        self.keep_average()
        for tensors, values in zip(self.tensors, state.get("own", []), strict="own" in state):
            foreach_copy_(tensors, values)
        self.global_weights.load_state_dict(state)

    def _values(self, buckets: Container[int] | None = None) -> list[list[Tensor] | None]:
        present = [bucket.views for bucket in self._kept] if self._swapped_in else self.tensors
        return [
            to_cpu(tensors) if buckets is None or index in buckets else None for index, tensors in enumerate(present)
        ]

    def _keep_present(self) -> None:
        self._kept = self._kept or [Bucket(tensors) for tensors in self.tensors]
        for kept, tensors in zip(self._kept, self.tensors, strict=True):
            kept.pack(tensors)


def average_among(
    replicas: Transport | ReplicaGroups, flat: Tensor, members: Sequence[int], background: bool = False
) -> Handle[Tensor]:
    """Sets ``flat`` to its mean over ``members``, this replica and its neighbors; a collective call."""
    peers = [member for member in members if member != replicas.rank]
    return replicas.average_with(flat, peers, background=background)


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


def _filled(values: Sequence[Any], present: Sequence[Any]) -> list[Any]:
    return [now if value is None else value for value, now in zip(values, present, strict=True)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
