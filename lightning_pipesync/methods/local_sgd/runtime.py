"""Local SGD in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import describe, raise_if_different
from lightning_pipesync.core.faults.admission import Job, start_job
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.methods.local_sgd.clock import number_of_participants
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.local_sgd.lab import LocalSGDLab
from lightning_pipesync.methods.local_sgd.optimizer_rounds import OptimizerRounds
from lightning_pipesync.methods.replicas.groups import check_group_size, replicas_of
from lightning_pipesync.methods.replicas.handover import Handover
from lightning_pipesync.methods.replicas.method import ReplicaMethod
from lightning_pipesync.methods.replicas.recovery import Recovery, Snapshot, reshard
from lightning_pipesync.methods.settings import config_from

T = TypeVar("T")

#: The attributes of the method itself that a section changes.
FLAGS = ("flushed", "_loaded", "_loaded_since_flush", "_followers_diverged")


class LocalSGD(ReplicaMethod):
    """Steps on each rank's own weights, which are averaged every ``period`` steps.

    With an outer optimizer the average of how far the ranks have moved is the gradient of the agreed weights, from
    which all ranks continue (DiLoCo). With fragments and overlap the average of a part of the model runs under some
    steps, one part after the other (Streaming DiLoCo). Floating-point buffers that changed are averaged at the end of a
    period, other buffers are copied from rank 0. Nothing is sent in between.

    A plain loop::

        sync = LocalSGD(model, optimizer, period=32)    # all ranks now have rank 0's weights
        for epoch in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                sync.step()                             # in place of optimizer.step()
            sync.flush()                                # the weights are the average of the replicas
            validate(model)
            sync.resume()                               # each rank's own replica again
        sync.flush()
        sync.detach()

    With ``outer_optimizer="elastic"`` the consolidated weights are the agreed ones, EASGD's center variable.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`LocalSGDConfig`.
    Every rank takes as many steps.
    """

    name = "local_sgd"
    config_type = LocalSGDConfig
    lab = LocalSGDLab
    shown_metrics = ("rounds", "mib_sent")

    config: LocalSGDConfig
    _recovery: Recovery | None = None
    _job: Job | None = None

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: Any = None,
        *,
        backend: str | None = None,
        **settings: Any,
    ) -> None:
        config = config_from(self.config_type, config, settings)
        if config.on_lost_rank == "continue" and not dist.is_initialized():
            self._job = start_job(config.timeout_s)
        super().__init__(module, optimizer, config, backend=backend)

    @property
    def num_steps(self) -> int:
        """The number of steps of the training so far, on all ranks, of the first optimizer."""
        return self._rounds[0].num_steps

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        self._parameters = parameters
        self._rounds = self._new_rounds()
        self._attach_replicas(parameters)
        self._followers_to_come: list[list[Tensor]] = []  # of rank 0, in a process that comes back
        self._recovery = Recovery(self, self.config.timeout_s, self._job) if self._can_undo else None

    @property
    def _units(self) -> list[OptimizerRounds]:
        return self._rounds

    @property
    def _averages_later(self) -> bool:
        return self.config.overlap_steps > 0

    @property
    def _can_undo(self) -> bool:
        return self.config.on_lost_rank == "continue"

    def _new_rounds(self) -> list[OptimizerRounds]:
        """Returns the rounds of each optimizer, among the ranks of the transport."""
        of_optimizer = [
            [parameter for parameter in self._parameters if parameter.group and parameter.group[0] == index]
            for index in range(len(self.optimizers))
        ]
        # Of several optimizers the gradients may become ready in another order on another rank.
        starts_in_pass = (lambda _: self.syncing) if len(self.optimizers) == 1 else None
        return [
            OptimizerRounds(optimizer, parameters, self.config, self.transport, self.data, starts_in_pass)
            for optimizer, parameters in zip(self.optimizers, of_optimizer, strict=True)
        ]

    def _drop_averages(self) -> None:
        for rounds in self._rounds:
            rounds.drop_averages()

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Averages the gradient in the warm-up, later in a group; see also :meth:`ReplicaMethod._reduce`."""
        self._rounds[index].average_gradient()
        super()._reduce(index, loss_scale)

    def _complete(self, index: int, loss_scale: float | None) -> bool:
        """Measures the gradient. What is averaged is not finite on all ranks, or on none."""
        self._rounds[index].measure_gradient()
        return False

    def _skip(self, index: int) -> None:
        self._rounds[index].skip_step()

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates this rank's weights, and averages what is due."""
        with self._rounds[index].in_step():
            result = self.user_steps.update_own(index, update)
        if self._rounds[index].meets_next:
            self._together(partial(self._end_step, index))
            self._non_trainable.keep_average()
        else:
            self._end_step(index)
        self._followers_diverged |= any(replicas.diverged for replicas in self._replicas)
        return result

    def _end_step(self, index: int) -> None:
        if self._rounds[index].end_step() and index == 0:
            self._non_trainable.average(self._can_undo)

    def metrics(self) -> dict[str, float]:
        """Returns what the first optimizer did, MiB sent and seconds of exposed communication.

        ``rounds`` is their number, ``lssr`` the share of local steps, ``lr_scale`` the factor on their learning rate.
        With groups, ``mib_between_groups`` is ``mib_sent`` without what a group exchanges among itself; with
        ``on_lost_rank="continue"``, ``ranks`` is the number of those that are left.
        """
        rounds = self._rounds[0]
        lssr = rounds.num_local_steps / rounds.num_steps if rounds.num_steps else 0.0
        metrics = {"rounds": rounds.num_rounds, "lssr": lssr, "lr_scale": rounds.lr_scale, **super().metrics()}
        if self.transport.row is not None:
            in_group = self.transport.row.bytes_sent
            metrics["mib_between_groups"] = (self.transport.traffic.total_bytes_sent - in_group) / MIB
        if self._can_undo:
            metrics["ranks"] = self.transport.world_size
        return metrics

    def flush(self) -> None:
        """Sets the weights and buffers to the average of the replicas, as :meth:`ReplicaMethod.flush` does.

        Ranks that come back take part from then on.
        """
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

    # --- lost ranks -------------------------------------------------------------------------------------------------

    def follow(self, module: nn.Module) -> None:
        """Makes :meth:`flush` average ``module``, too; in a process that comes back, it becomes that of rank 0."""
        super().follow(module)
        if self._followers_to_come:
            self._followers[-1].take_over(self._followers_to_come.pop(0))

    def snapshot(self) -> Snapshot:
        """Returns what a section may change, see :class:`Recovery`; not a collective call."""
        units = [rounds.snapshot() for rounds in self._rounds]
        flags = {name: getattr(self, name) for name in FLAGS}
        return Snapshot(self.transport.rank, self.transport.world_size, units, flags)

    def regroup(self, snapshot: Snapshot, newcomers: Sequence[int]) -> None:
        """Continues from ``snapshot`` with the ranks of the present default process group; a collective call.

        Those of them who are ``newcomers`` continue from rank 0's, with the consolidated weights as their own. Averages
        under way are dropped, and a lossy codec's residuals start at zero.
        """
        traffic = self.transport.traffic.state_dict()
        self.transport = self._make_transport(self.transport.device, self.transport.backend)
        self.transport.traffic.load_state_dict(traffic)
        self.data.transport = self.transport
        for tensors in (self._non_trainable, *self._followers):
            tensors.transport = self.transport
        is_new = self.transport.rank in newcomers
        if is_new:
            snapshot = self._continue_from(Handover.receive(self.transport))
        elif self.transport.rank == 0 and newcomers:
            self._handover(snapshot).send(self.transport, newcomers)
        for rounds in self._rounds:
            rounds.close()
        self._rounds = self._new_rounds()
        for rounds, unit in zip(self._rounds, snapshot.units, strict=True):
            replicas = unit["replicas"]
            agreed = reshard(replicas["agreed"], snapshot, self.transport)
            rounds.restore({**unit, "replicas": {**replicas, "agreed": agreed}})
            if is_new:
                rounds.replicas.adopt_average()
        for name, value in snapshot.flags.items():
            setattr(self, name, value)

    def _handover(self, snapshot: Snapshot) -> Handover:
        """Returns what rank 0 hands over to ranks that come back."""
        return Handover(
            describe(self.config, self._parameters, self._module),
            [tensor.detach() for tensor in self._all_tensors()],
            [optimizer.state_dict() for optimizer in self.optimizers],
            [[tensor.detach() for tensor in follower.tensors] for follower in self._followers],
            snapshot,
        )

    def _continue_from(self, handover: Handover) -> Snapshot:
        """Takes over what rank 0 has, in a rank that comes back; returns the snapshot to continue from.

        Raises:
            ValueError: this rank has other settings, or another model.
        """
        described = describe(self.config, self._parameters, self._module)
        raise_if_different(handover.described, described, self.transport.rank)
        handover.load(self._all_tensors(), self.optimizers)
        self._non_trainable.agree()
        self._followers_to_come = handover.followers
        return handover.snapshot

    def _all_tensors(self) -> list[Tensor]:
        return [*(parameter.tensor for parameter in self._parameters), *self._read_buffers()]

    def undo_averages(self) -> None:
        """Restores what averages have replaced that no optimizer updates; not a collective call."""
        for tensors in (self._non_trainable, *self._followers):
            tensors.undo_average()

    def _detach(self, timeout_s: float) -> None:
        """Ends the method's threads and process groups. The weights stay as they are."""
        if self._recovery is not None:
            self._recovery.close()
        for rounds in getattr(self, "_rounds", ()):
            rounds.close()
        super()._detach(timeout_s)

    def _together(self, section: Callable[[], T]) -> T:
        return section() if self._recovery is None else self._recovery.run(section)

    def _make_transport(self, device: torch.device, backend: str | None) -> Transport:
        size = self.config.ranks_per_replica
        if size == 1:
            return super()._make_transport(device, backend)
        check_group_size(size, dist.get_world_size())
        return Transport(device, timeout_s=self.config.timeout_s, backend=backend, topology="rows", torus_columns=size)

    def _problem(self) -> ValueError | None:
        config, world_size = self.config, replicas_of(self.transport).world_size
        if self._job is not None and self._job.comes_back:  # rank 0 has the same settings, and more ranks
            return None
        if number_of_participants(config.participation, world_size) == 0:
            return ValueError(
                f"participation={config.participation!r} of {world_size} replicas gives none to average: set at least "
                f"{1 / world_size:.3g}."
            )
        if world_size * (force := config.force(world_size)) > 1:
            return ValueError(
                f"elastic_force={force!r} moves the agreed weights by {world_size * force:.3g} times their distance to "
                f"{world_size} replicas, beyond them: set {1 / world_size:.3g} at most (EASGD: ranks * alpha <= 1)."
            )
        if config.on_lost_rank == "continue":
            backends = {dist.get_backend(), self.transport.backend}
            if backends != {"gloo"}:
                return ValueError(
                    f"on_lost_rank='continue' makes new Gloo groups, and the process groups here use "
                    f"{', '.join(sorted(backends))}: call init_process_group('gloo'), and give LocalSGD backend='gloo'."
                )
        return None

    def _shape_settings(self) -> dict[str, Any]:
        """Returns the settings that determine the structure of :meth:`state_dict`."""
        config = self.config
        return {
            "compression": str(config.compression),
            "error_feedback": config.uses_error_feedback,
            "bucket_mb": config.bucket_mb,
            "outer_optimizer": config.outer_optimizer,
            "fragments": config.fragments,
            "ranks_per_replica": config.ranks_per_replica,
            "warmup_steps": config.warmup_steps,
        }
