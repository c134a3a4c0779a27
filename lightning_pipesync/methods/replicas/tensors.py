"""The parameters of which every rank trains its own replica, and their average over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.digest import digest
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.torch_private import foreach_add_, foreach_lerp_
from lightning_pipesync.methods.replicas.groups import ReplicaGroups, replicas_of
from lightning_pipesync.methods.replicas.outer import MakeOptimizer, OuterStep

#: A bucket's agreed values, and the outer optimizer's state of this rank's shard of them.
Agreed: TypeAlias = tuple[Tensor, Any]


class ReplicatedTensors:
    """Averages tensors over the ranks, with all buckets in flight at the same time.

    Args:
        buckets: tensors of each bucket, floating-point, of one dtype on one device, the same on all ranks.
        transport: the way to the other ranks.
        codec: of :meth:`synchronize`.
        error_feedback: whether the error of a lossy codec is added to what is sent next.
        outer: makes the optimizer of the outer step of :meth:`synchronize`; None: the plain average.
        elastic_force: if not 0, a rank does not continue from the agreed weights: they attract its own by this share of
            their distance (EASGD).

    Attributes:
        tensors: those of each bucket.
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
    ) -> None:
        self.tensors = list(buckets)
        self._transport, self._replicas = transport, replicas_of(transport)
        self._codec = get_codec(codec)
        self._elastic_force = elastic_force
        self._own: list[Bucket] = []
        self._swapped_in = False
        self.diverged = False
        # Lossy codecs encode how far the weights moved since the last synchronized step, never the weights
        # themselves. The outer step needs the same difference.
        self._agreed: list[Tensor] = []
        self._feedback: list[ErrorFeedback | None] = []
        if outer or not self._codec.lossless:
            self._agreed = [torch.zeros_like(bucket.flat) for bucket in self._buckets]
            self.agree()
            self._feedback = [self._replicas.feedback(b.flat) if error_feedback else None for b in self._buckets]
        self._outer = OuterStep([self._replicas.shard(agreed) for agreed in self._agreed], outer) if outer else None

    @cached_property
    def _buckets(self) -> list[Bucket]:
        return [Bucket(tensors) for tensors in self.tensors]

    def agree(self) -> None:
        """Makes the present values, which are the same on all ranks, the agreed ones, if there are any."""
        for agreed, bucket, tensors in zip(self._agreed, self._buckets, self.tensors, strict=bool(self._agreed)):
            bucket.pack(tensors)
            agreed.copy_(bucket.flat)

    @property
    def agrees(self) -> bool:
        """Whether there are agreed values."""
        return bool(self._agreed)

    def agree_on_present(self) -> None:
        """Makes the present values the agreed ones, their average if the ranks' differ; a collective call."""
        if not self._agreed:
            return
        if len(set(self._transport.gather_objects(digest(self.tensors)))) > 1:
            self._average_over(self._transport)
        self.agree()

    def packed(self, index: int) -> Tensor:
        """Returns the tensors of a bucket, fused; until :meth:`start`, or another average, uses the buffer."""
        self._buckets[index].pack(self.tensors[index])
        return self._buckets[index].flat

    def result(self, index: int) -> Tensor:
        """Returns the buffer of a bucket's average between :meth:`start` and :meth:`finish`."""
        return self._buckets[index].flat

    def average(self) -> None:
        """Sets the tensors to their exact average over the replicas; a collective call."""
        self._average_over(self._replicas)
        self.diverged = False

    def synchronize(self) -> None:
        """Sets the tensors to their average over the ranks, by way of the codec and the outer step; collective."""
        for index, handle in enumerate([self.start(index) for index in range(len(self.tensors))]):
            handle.wait()
            self.finish(index)
        self.diverged = False

    @torch.no_grad()
    def start(self, index: int, participants: Sequence[int] | None = None, background: bool = False) -> Handle[Tensor]:
        """Starts to average a bucket, by way of codec and outer step; collective. :meth:`finish` sets its tensors.

        Args:
            index: index of the bucket.
            participants: the replicas whose values are averaged; None: all.
            background: as in :meth:`Collectives.all_reduce`.
        """
        bucket = self._buckets[index]
        bucket.pack(self.tensors[index])
        if self._agreed:
            bucket.flat.sub_(self._agreed[index])
        if self._elastic_force:
            foreach_add_(self.tensors[index], bucket.views, alpha=-self._elastic_force)
        if participants is not None and self._replicas.rank not in participants:
            bucket.flat.zero_()
        count = None if participants is None else len(participants)
        return self._replicas.all_reduce(
            bucket.flat,
            codec=self._codec,
            mean=participants is None,
            feedback=self._feedback[index] if self._agreed else None,
            between=partial(self._between, index, count) if self._outer or count else None,
            background=background,
        )

    def finish(self, index: int, _: object = None) -> None:
        """Agrees on the average of a bucket that has arrived, and sets its tensors."""
        self.agree_on_average(index)
        self.apply(index)

    @torch.no_grad()
    def agree_on_average(self, index: int) -> None:
        """Updates the agreed values of a bucket whose average has arrived; once, and on all ranks."""
        bucket = self._buckets[index]
        if self._agreed and self._codec.lossless:
            self._agreed[index].copy_(bucket.flat)
        elif self._agreed:
            bucket.flat.copy_(self._agreed[index].add_(bucket.flat))

    @torch.no_grad()
    def apply(self, index: int, own_share: float = 0.0) -> None:
        """Sets the tensors of a bucket, unless an elastic force alone moves them.

        Args:
            index: index of the bucket.
            own_share: the share of this rank's own values that stays, from 0 to 1.
        """
        bucket = self._buckets[index]
        if self._elastic_force:
            return
        if own_share:
            foreach_lerp_(self.tensors[index], bucket.views, 1 - own_share)
        else:
            bucket.unpack(self.tensors[index])

    @torch.no_grad()
    def add_progress(self, index: int, before: Tensor) -> None:
        """Adds to the average of a bucket, which has arrived, what its tensors have moved since it started.

        Args:
            index: index of the bucket.
            before: its values when the average started, fused; they are on the CPU after a resume.
        """
        bucket = self._buckets[index]
        if not self._elastic_force:
            bucket.flat.sub_(before.to(bucket.flat.device))
            foreach_add_(self.tensors[index], bucket.views, alpha=1)

    def _average_over(self, collectives: Transport | ReplicaGroups) -> None:
        handles = []
        for bucket, tensors in zip(self._buckets, self.tensors, strict=True):
            bucket.pack(tensors)
            handles.append(collectives.all_reduce(bucket.flat, mean=True))
        for handle, bucket, tensors in zip(handles, self._buckets, self.tensors, strict=True):
            handle.wait()
            bucket.unpack(tensors)

    @torch.no_grad()
    def _between(self, index: int, count: int | None, own: Tensor) -> None:
        """Replaces this rank's shard of the average by what is gathered: values, or with a lossy codec a difference."""
        if count is not None:
            own.div_(count)
        if self._outer is None:
            return
        agreed = self._replicas.shard(self._agreed[index])
        before = None if self._codec.lossless else agreed.clone()
        stepped = self._outer.step(index, own.to(agreed.device))
        if before is None:
            own.copy_(stepped)
        else:  # all ranks add the decoded difference, this one, too
            difference = stepped - before
            agreed.copy_(before)
            own.copy_(difference)  # last: it makes the host wait, if it has to

    def swap_in_average(self) -> None:
        """Sets the tensors to their average, and keeps this rank's own values for :meth:`swap_back`; collective.

        Nothing happens if none diverged. With an elastic force the tensors become the agreed ones.
        """
        if self._swapped_in or not self.diverged:
            return
        self._own = self._own or [Bucket(tensors) for tensors in self.tensors]
        for own, tensors in zip(self._own, self.tensors, strict=True):
            own.pack(tensors)
        if self._elastic_force:
            self._set(self._agreed)
        else:
            self.average()
        self._swapped_in = True

    @torch.no_grad()
    def swap_back(self) -> None:
        """Restores this rank's own values, except those of tensors that were written to since the swap."""
        if not self._swapped_in:
            return
        for own, average, tensors in zip(self._own, self._buckets, self.tensors, strict=True):
            written = differing(tensors, average.views)
            for tensor, value, keep in zip(tensors, own.views, written, strict=True):
                if not keep:
                    tensor.copy_(value)
        self._swapped_in = False
        self.diverged = True

    def written_since_swap(self) -> bool:
        """Returns whether tensors were written to since :meth:`swap_in_average`; True if that has kept no values."""
        pairs = zip(self._buckets, self.tensors, strict=True)
        return not self._swapped_in or any(any(differing(tensors, average.views)) for average, tensors in pairs)

    def keep_average(self) -> None:
        """Drops the values that :meth:`swap_in_average` kept: training continues from the average."""
        self._swapped_in = False

    def snapshot(self, agreed: Mapping[int, Agreed]) -> dict[str, Any]:
        """Returns copies on the CPU of all that an average changes, except a codec's residuals; not collective.

        With it the average can be undone, and repeated with other ranks, see :meth:`restore`.

        Args:
            agreed: what :meth:`agreed_of` returned of the buckets whose average is under way, before it started.
        """
        own = [bucket.views for bucket in self._own] if self._swapped_in else self.tensors
        return {
            "own": [to_cpu(tensors) for tensors in own],
            "average": to_cpu([bucket.flat for bucket in self._buckets]) if self._swapped_in else None,
            "agreed": {**self.agreed_of(set(range(len(self.tensors))) - set(agreed)), **agreed},
            "diverged": self.diverged,
        }

    def agreed_of(self, indices: Iterable[int]) -> dict[int, Agreed]:
        """Returns copies on the CPU of the agreed values and the outer state of buckets, by index; none if none agree.

        No average of these buckets may be under way.
        """
        if not self._agreed:
            return {}
        return {i: (to_cpu([self._agreed[i]])[0], self._outer.state_of(i) if self._outer else {}) for i in indices}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continues from what :meth:`snapshot` returned on this rank, with the outer state of its present shards."""
        agreed = [snapshot["agreed"][index] for index in range(len(self._agreed))]
        for tensors, values in zip(self.tensors, snapshot["own"], strict=True):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for present, (value, _) in zip(self._agreed, agreed, strict=True):
            present.copy_(value)
        if self._outer:
            self._outer.load_state_dict({"states": [outer for _, outer in agreed]})
        self.diverged = snapshot["diverged"]
        if snapshot["average"] is not None:
            self._own = [Bucket(tensors) for tensors in self.tensors]
            for own, tensors in zip(self._own, self.tensors, strict=True):
                own.pack(tensors)
            self._set(snapshot["average"])
            self._swapped_in = True

    def adopt_average(self) -> None:
        """Makes the average, if it is swapped in, also what :meth:`swap_back` restores."""
        for own, average in zip(self._own if self._swapped_in else [], self._buckets, strict=False):
            own.flat.copy_(average.flat)

    def state_dict(self) -> dict[str, Any]:
        """Returns, on the CPU, this rank's own values if they differ, and what the codec and the outer step need."""
        state: dict[str, Any] = {}
        if self._swapped_in:
            state["own"] = [to_cpu(bucket.views) for bucket in self._own]
        elif self.diverged:
            state["own"] = [to_cpu(tensors) for tensors in self.tensors]
        if self._agreed:
            state["common"] = to_cpu(self._agreed)
            state["feedback"] = [feedback.state_dict() for feedback in self._feedback if feedback is not None]
            state["outer"] = self._outer.state_dict() if self._outer else {}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        self.diverged = "own" in state
        self._swapped_in = False
        for values, tensors in zip(state.get("own", []), self.tensors, strict=False):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        if self._agreed and "common" in state:
            for agreed, value in zip(self._agreed, state["common"], strict=True):
                agreed.copy_(value)
            kept = [feedback for feedback in self._feedback if feedback is not None]
            for feedback, residuals in zip(kept, state["feedback"], strict=True):
                feedback.load_state_dict(residuals)
            if self._outer:
                self._outer.load_state_dict(state["outer"])

    def _set(self, flats: Sequence[Tensor]) -> None:
        """Sets the tensors to the values of flat buffers."""
        for bucket, flat, tensors in zip(self._buckets, flats, self.tensors, strict=True):
            bucket.flat.copy_(flat)
            bucket.unpack(tensors)


def differing(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Returns for each pair of tensors on one device whether their shapes or bits differ; a NaN equals itself."""
    if not tensors:
        return []
    differ = [
        (_bits(tensor) != _bits(other)).any()
        if tensor.shape == other.shape
        else torch.ones((), dtype=torch.bool, device=tensor.device)
        for tensor, other in zip(tensors, others, strict=True)
    ]
    result: list[bool] = torch.stack(differ).tolist()  # the host waits for the device once, not for each
    return result


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies on the CPU."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
