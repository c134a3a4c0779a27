"""Replica methods that continue without a lost rank, and with one that comes back (``on_lost_rank="continue"``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.buckets import shard_slice
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import describe, raise_if_different
from lightning_pipesync.core.faults.admission import Job, start_job
from lightning_pipesync.core.parameters import NamedParameter, load_optimizer_state
from lightning_pipesync.core.torch_private import foreach_copy_, map_tensors
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.methods.metric_info import MetricInfo
from lightning_pipesync.methods.replicas.method import Changes, ReplicaMethod
from lightning_pipesync.methods.replicas.recovery import Recovery
from lightning_pipesync.methods.settings import config_from

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """What a section may change of a method, see :class:`Recovery`, on ``rank`` of ``world_size`` ranks."""

    rank: int
    world_size: int
    flushed: bool
    changes: Changes
    units: list[dict[str, Any]]

    def with_outer_states(self, change: Callable[[int, Any], Any]) -> Snapshot:
        """Returns a copy with ``change(numel, state)`` in place of the outer state of each bucket."""
        units = []
        for unit in self.units:
            replicas = unit["fragments"]["replicas"]
            if replicas.get("outer"):
                states = zip(replicas["common"], replicas["outer"]["states"], strict=True)
                outer = {"states": [change(flat.numel(), state) for flat, state in states]}
                unit = {**unit, "fragments": {**unit["fragments"], "replicas": {**replicas, "outer": outer}}}
            units.append(unit)
        return replace(self, units=units)


class ElasticReplicaMethod(ReplicaMethod):
    """A replica method whose ranks may be lost, and come back; see :class:`Recovery` and :class:`ReplicaMethod`.

    Its policies may communicate in :meth:`AveragingPolicy.end_step` and ``check_consolidation`` only, and only in steps
    for which ``may_start`` is True.
    """

    metric_infos = MappingProxyType(
        {
            **ReplicaMethod.metric_infos,
            "ranks": MetricInfo('remaining ranks, with `on_lost_rank="continue"`', over_ranks="same"),
        }
    )

    _recovery: Recovery | None = None
    _job: Job | None = None

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: Any = None,
        *,
        backend: str | None = None,
        replicas: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        config = config_from(self.config_type, config, settings)
        if config.undoes_averages and not dist.is_initialized():
            self._job = start_job(config.timeout_s)
        super().__init__(module, optimizer, config, backend=backend, replicas=replicas)

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        super()._attach(parameters)
        self._followers_to_come: list[list[Tensor]] = []  # of rank 0, in a process that comes back
        if self.config.undoes_averages:
            self._recovery = Recovery(self, self.config.timeout_s, self._job)

    @property
    def num_steps(self) -> int:
        """Number of steps of the first optimizer since the start of the training, also before this process started."""
        return self._units[0].num_steps

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the first optimizer."""
        return self._units[0].num_rounds

    def metrics(self) -> dict[str, float]:
        """Returns those of :meth:`ReplicaMethod.metrics`; if ranks may be lost also ``ranks``, how many are left."""
        remaining = {"ranks": self.transport.world_size} if self.config.undoes_averages else {}
        return {**super().metrics(), **remaining}

    def flush(self) -> None:
        """See :meth:`ReplicaMethod.flush`; afterwards, admits ranks that come back."""
        if self.flushed:
            return
        super().flush()
        if self._recovery is not None:
            self._recovery.admit()

    def prepare_train_loader(
        self, loader: DataLoader[Any], seed: int = 0, to_device: Callable[[Any], Any] | None = None
    ) -> TrainLoader:
        """See :meth:`SyncMethod.prepare_train_loader`; divides the data among the ranks that are left."""
        return self._together(partial(super().prepare_train_loader, loader, seed, to_device))

    def follow(self, module: nn.Module) -> None:
        """See :meth:`ReplicaMethod.follow`; a process that comes back gets the tensors of rank 0's module."""
        super().follow(module)
        if self._followers_to_come:
            self._followers[-1].take_over(self._followers_to_come.pop(0))

    def snapshot(self) -> Snapshot:
        units = [unit.snapshot() for unit in self._units]
        return Snapshot(self.transport.rank, self.transport.world_size, self.flushed, replace(self._changes), units)

    def regroup(self, snapshot: Snapshot, newcomers: Sequence[int]) -> None:
        """Continues from ``snapshot`` with the ranks of the present default process group; a collective call.

        ``newcomers`` among them continue from rank 0's snapshot, with the consolidated weights. Averages under way are
        dropped, and a lossy codec's residuals start at zero.
        """
        traffic = self.transport.traffic.state_dict()
        self.transport = self._make_transport(self.transport.device, self.transport.backend)
        self.transport.traffic.load_state_dict(traffic)
        self.data.transport = self.transport
        for tensors in (self._non_trainable, *self._followers):
            tensors.transport = self.transport
        is_new = self.transport.rank in newcomers
        if is_new:
            snapshot = self._take_over(self.transport.receive_state(0))
        for rank in newcomers if self.transport.rank == 0 else ():
            self.transport.send_state(self._handover(snapshot), rank)
        for unit in self._units:
            unit.close()
        self._units = self._new_units()
        present = snapshot.with_outer_states(partial(_resharded, snapshot.rank, snapshot.world_size, self.transport))
        for unit, saved in zip(self._units, present.units, strict=True):
            unit.restore(saved)
            if is_new:
                unit.replicas.adopt_average()
        self.flushed, self._changes = snapshot.flushed, replace(snapshot.changes)

    def undo_averages(self) -> None:
        """Restores the tensors that no optimizer updates; not a collective call."""
        for tensors in (self._non_trainable, *self._followers):
            tensors.undo_average()

    def _together(self, section: Callable[[], T]) -> T:
        return section() if self._recovery is None else self._recovery.run(section)

    def _problem_of_losses(self) -> ValueError | None:
        backends = {dist.get_backend(), self.transport.backend}
        if backends == {"gloo"}:
            return None
        return ValueError(
            "on_lost_rank='continue' makes new Gloo groups, and the process groups here use "
            f"{', '.join(sorted(backends))}: call init_process_group('gloo'), and give {type(self).__name__} "
            "backend='gloo'."
        )

    def _detach(self, timeout_s: float) -> None:
        if self._recovery is not None:
            self._recovery.close()
        super()._detach(timeout_s)

    def _handover(self, snapshot: Snapshot) -> dict[str, Any]:
        """Returns what rank 0 sends to a rank that comes back."""
        return {
            "described": describe(self.config, self._parameters, self._module),
            "tensors": [tensor.detach() for tensor in self._all_tensors()],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "followers": [[tensor.detach() for tensor in follower.tensors] for follower in self._followers],
            "snapshot": {**vars(snapshot), "changes": asdict(snapshot.changes)},
        }

    @torch.no_grad()
    def _take_over(self, handover: dict[str, Any]) -> Snapshot:
        """Copies rank 0's state into a rank that comes back; returns the snapshot to continue from.

        Raises:
            ValueError: this rank has other settings, or another model.
        """
        described = describe(self.config, self._parameters, self._module)
        raise_if_different(handover["described"], described, self.transport.rank)
        foreach_copy_(self._all_tensors(), handover["tensors"])
        for optimizer, state in zip(self.optimizers, handover["optimizers"], strict=True):
            load_optimizer_state(optimizer, state)
        self._non_trainable.mark_common()
        self._followers_to_come = handover["followers"]
        saved = handover["snapshot"]
        return Snapshot(**{**saved, "changes": Changes(**saved["changes"])}).with_outer_states(_zeroed)

    def _all_tensors(self) -> list[Tensor]:
        return [*(parameter.tensor for parameter in self._parameters), *self._read_buffers()]


def _resharded(rank: int, world_size: int, transport: Transport, numel: int, outer: Any) -> Any:
    """Returns the outer state of this rank's present shard of a bucket of ``numel`` values; a collective call.

    ``outer`` is that of the shard of ``rank`` among ``world_size`` ranks. A lost rank's part of the state is zero.
    """

    def resharded(tensor: Tensor) -> Tensor:
        if not tensor.dim():  # a counter of steps, which is the same on all ranks
            return tensor
        flat = torch.zeros(numel, dtype=tensor.dtype)
        flat[shard_slice(numel, rank, world_size)] = tensor
        return transport.shard(transport.all_reduce(flat).wait()).clone()

    return map_tensors(resharded, outer)


def _zeroed(numel: int, outer: Any) -> Any:
    """Returns an outer state of zeros: rank 0 contributes its part when the state is resharded."""
    return map_tensors(lambda tensor: torch.zeros_like(tensor) if tensor.dim() else tensor, outer)
