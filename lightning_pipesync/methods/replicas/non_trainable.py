"""Tensors that no optimizer updates: buffers, and parameters in no optimizer (of a teacher, of a frozen backbone)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.dtensors import LocalShard
from lightning_pipesync.core.fingerprints import can_be_averaged, marks_of
from lightning_pipesync.methods.replicas.groups import average_among, replicas_of
from lightning_pipesync.methods.replicas.weights import differing, restore_unwritten, to_cpu


class NonTrainableTensors:
    """Averages those tensors that some rank has changed since all ranks had the same values.

    Tensors that no rank changes cause no traffic and keep their bits: a mask of -inf, a table of positions, frozen
    weights. All ranks copy rank 0's integers, booleans, complex numbers and 8-bit floats. Ranks that hold a replica
    together have buffers of their own, which are averaged, too.

    Buffers are compared with a copy, parameters as in [Note: what counts as changed].

    ``read_buffers`` returns the current buffers, which modules may replace; ``transport`` may be replaced, too. The
    ranks that hold a replica together have the same tensors, or, if not ``same_in_replica``, each its own.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        read_buffers: Callable[[], list[Tensor]],
        transport: Transport,
        bucket_mb: float,
        same_in_replica: bool = True,
    ) -> None:
        self._same_in_replica = same_in_replica
        self._parameters, self._read_buffers = list(parameters), read_buffers
        self.transport, self._bucket_mb = transport, bucket_mb
        self._kept: dict[int, Tensor] = {}
        self._average: dict[int, Tensor] = {}
        self._record_common()

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._parameters, *self._read_buffers()]

    def average(self, keep: bool = False, with_parameters: bool = True, members: Sequence[int] | None = None) -> None:
        """Averages the tensors that some rank has changed; a collective call.

        Args:
            keep: whether to keep this rank's values for :meth:`undo_average`, until :meth:`keep_average`.
            with_parameters: False: all ranks have changed the parameters alike.
            members: this replica and its neighbors, whose values are averaged; None: those of all ranks. With
                neighbors, what cannot be averaged stays as it is.
        """
        changed, shards = self._changed(), self.transport.shards if self._same_in_replica else None
        anywhere = self.transport.union(changed).wait() if changed else []
        if shards is not None and changed:
            anywhere = shards.union(anywhere).wait()
        tensors = self._pick(i for i, some in enumerate(anywhere) if some and (with_parameters or self._is_buffer(i)))
        if keep:
            self._kept = _copies(tensors)
        mean = [tensor for tensor in tensors.values() if can_be_averaged(tensor)]
        rank_0 = [tensor for tensor in tensors.values() if not can_be_averaged(tensor) and members is None]
        exchange_fused(mean, self._bucket_mb, partial(self._start_average, members=members))
        exchange_fused(rank_0, self._bucket_mb, self.transport.broadcast)
        if shards is not None:
            exchange_fused(_without_shards(mean), self._bucket_mb, lambda flat: shards.all_reduce(flat, mean=True))
            exchange_fused(_without_shards(rank_0), self._bucket_mb, shards.broadcast)
        if tensors and members is None:
            self._record_common()

    @torch.no_grad()
    def undo_average(self) -> None:
        """Restores the values that an average, complete or not, has kept."""
        for index, tensor in self._pick(self._kept).items():
            tensor.copy_(self._kept[index])
        self.keep_average()

    def swap_in_average(self) -> None:
        """Calls :meth:`average`, and keeps this rank's values for :meth:`swap_back`."""
        if not self._kept:
            self.average(keep=True)
            self._average = _copies(self._pick(self._kept))

    @torch.no_grad()
    def swap_in_common(self) -> None:
        """Sets the buffers to those that all ranks had last, and keeps this rank's values for :meth:`swap_back`.

        Not a collective call.
        """
        if self._kept:
            return
        first = len(self._parameters)
        changed = self._pick(i for i, now in enumerate(self._changed()) if now and self._is_buffer(i))
        self._kept = _copies(changed)
        for index, tensor in changed.items():
            tensor.copy_(self._common_buffers[index - first])
        self._average = _copies(changed)

    def swap_back(self) -> None:
        """Restores this rank's values, except those of tensors that were written to since the swap."""
        tensors = self._pick(self._kept)
        restore_unwritten(list(tensors.values()), list(self._average.values()), list(self._kept.values()))
        self.keep_average()

    def keep_average(self) -> None:
        """Drops the values that :meth:`swap_in_average` kept: training continues from the average."""
        self._kept, self._average = {}, {}

    def mark_common(self) -> None:
        """Notes that all ranks have the present values."""
        self.keep_average()
        self._record_common()

    def state_dict(self) -> dict[str, Any]:
        """Returns, on the CPU, the tensors that this rank has changed, and what the buffers among them were before."""
        own = self._kept or self._pick(index for index, changed in enumerate(self._changed()) if changed)
        common = {index: self._common_buffers[index - len(self._parameters)] for index in own if self._is_buffer(index)}
        return {
            "own": dict(zip(own, to_cpu(list(own.values())), strict=True)),
            "common": dict(zip(common, to_cpu(list(common.values())), strict=True)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank, after the consolidated tensors were loaded."""
        self.mark_common()
        for index, value in state["common"].items():
            self._common_buffers[index - len(self._parameters)].copy_(value)
        for index, tensor in self._pick(state["own"]).items():
            tensor.copy_(state["own"][index])

    def _start_average(self, flat: Tensor, members: Sequence[int] | None) -> Handle[Tensor]:
        if members is None:
            return self.transport.all_reduce(flat, mean=True)
        if self.transport.row is not None:  # a group's ranks have buffers of their own
            self.transport.row.all_reduce(flat, mean=True).wait()
        return average_among(replicas_of(self.transport), flat, members)

    def _changed(self) -> list[bool]:
        parameters = [now != then for now, then in zip(marks_of(self._parameters), self._common_marks, strict=True)]
        return parameters + differing(self._read_buffers(), self._common_buffers)

    def _record_common(self) -> None:
        self._common_marks = marks_of(self._parameters)
        self._common_buffers = [buffer.detach().clone() for buffer in self._read_buffers()]

    def _pick(self, indices: Iterable[int]) -> dict[int, Tensor]:
        tensors = self.tensors
        return {index: tensors[index] for index in indices}

    def _is_buffer(self, index: int) -> bool:
        return index >= len(self._parameters)


def _without_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not isinstance(tensor, LocalShard)]


def _copies(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    return {index: tensor.detach().clone() for index, tensor in tensors.items()}
