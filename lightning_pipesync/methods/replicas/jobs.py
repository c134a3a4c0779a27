"""Replica methods whose replicas are jobs of their own, which come and go (``lighthouse=``)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.faults.errors import is_normal_end
from lightning_pipesync.core.faults.notice import STATUS
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.methods.method import MetricInfo
from lightning_pipesync.methods.replicas.departure import Departure
from lightning_pipesync.methods.replicas.method import ReplicaMethod
from lightning_pipesync.methods.replicas.regrouping import RegroupedReplicaMethod
from lightning_pipesync.methods.replicas.sections import Sections
from lightning_pipesync.methods.replicas.training_steps import TrainingSteps
from lightning_pipesync.methods.settings import config_from

T = TypeVar("T")


class ElasticReplicaMethod(RegroupedReplicaMethod):
    """A replica method whose replicas can be jobs of their own; see :class:`ReplicaMethod`.

    With ``lighthouse`` the ranks of this job have one replica, and the other replicas are jobs that come and go. Then
    the consolidated weights are the agreed ones, of the last round, and :meth:`flush` does not communicate. Its
    policies may communicate in :meth:`AveragingPolicy.end_step` only, and only in steps for which ``may_start`` is
    True.
    """

    metric_infos = MappingProxyType(
        {
            **ReplicaMethod.metric_infos,
            "replicas": MetricInfo("replicas in the last round, with `lighthouse`", over_ranks="same"),
        }
    )

    _sections: Sections | None = None
    _departure: Departure  # with sections
    _has_ended = False  # whether :meth:`end` was called since the last step

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
        if config.lighthouse is not None and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        super().__init__(module, optimizer, config, backend=backend, replicas=replicas)

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        super()._attach(parameters)
        config, self._training_steps = self.config, TrainingSteps(len(self.optimizers))
        self.data.elastic = config.lighthouse is not None
        if config.lighthouse is not None:
            self._sections = Sections(self, config.lighthouse, config.num_replicas or 1, config.timeout_s)
            self._departure = Departure(self._sections.greatest)
            self.data.between_batches = self._end_if_left

    def metrics(self) -> dict[str, float]:
        """Returns those of :meth:`ReplicaMethod.metrics`; with ``lighthouse`` also ``replicas``, how many there are."""
        number = {} if self._sections is None else {"replicas": self.transport.world_size}
        return {**super().metrics(), **number}

    # --- replicas that come -----------------------------------------------------------------------------------------

    def join(self) -> None:
        """Joins the other replicas, before the first forward pass, after a checkpoint was loaded.

        If they train already, waits for the end of their round, and takes over the weights, the optimizers' states, the
        outer state, the number of steps and the place in the data. Does nothing without ``lighthouse``, or the second
        time. :meth:`prepare_train_loader` calls it, too.

        Raises:
            RuntimeError: the lighthouse does not answer, or there are fewer replicas than training begins with.
            ValueError: this replica has other settings, or another model, than the others.
        """
        if self._sections is None or self._sections.has_joined:
            return
        for of_unit in self._replicas if self._resumed is None else []:
            of_unit.set_global_weights()
        self._changes.loaded = False
        self._sections.join()
        self._departure.notice.listen()

    def prepare_train_loader(
        self, loader: DataLoader[Any], seed: int = 0, to_device: Callable[[Any], Any] | None = None
    ) -> TrainLoader:
        """See :meth:`SyncMethod.prepare_train_loader`; replicas that come and go divide what is left of an epoch."""
        self.join()
        return super().prepare_train_loader(loader, seed, to_device)

    def _begin(self) -> None:
        super()._begin()
        if self._sections is not None and not self._sections.has_joined:
            raise RuntimeError(
                f"{type(self).__name__} has not joined the other replicas: call join() before the first forward pass, "
                "after loading a checkpoint."
            )

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        self._resumed, self._has_ended = None, False
        begins = self._training_steps.take_part(index)
        if self._sections is not None:
            self._end_if_left()
            self._sections.go_on()
            self._sections.send_rest()
            if begins:
                self._departure.begin_step(self._units[self._training_steps.last].starts_in)
        super()._reduce(index, loss_scale)

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        result = super()._step(index, update)
        if self._sections is None:
            return result
        is_under_way = any(unit.is_under_way for unit in self._units)  # then the others would wait for this replica
        if self._departure.is_now and index == self._training_steps.last and not (self.has_left or is_under_way):
            self._sections.leave_now()
        if self.has_left and dist.get_rank() == 0:
            warnings.warn(
                f"This replica was asked to leave, and has left after {self.num_rounds} rounds.", stacklevel=4
            )
        return result

    # --- a replica that leaves --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Asks this replica to leave: after the next round, if that comes within 20 seconds, otherwise at once.

        May be called by a signal's handler, on any rank of the job. SIGTERM does the same, unless the program has a
        handler of its own. When the replica has left, the next batch of a prepared loader, or the next step, raises
        ``SystemExit(143)`` on all ranks of the job: catch it to save a checkpoint. Does nothing without ``lighthouse``.
        """
        if self._sections is not None:
            self._departure.notice.give()

    def handle_sigterm(self, number: int, frame: Any) -> bool:
        if self._sections is None:
            return False
        if not self._sections.has_joined:  # it waits for the others, who may never come
            raise SystemExit(STATUS)
        self._departure.notice.handle(number, frame)
        return True

    @property
    def has_left(self) -> bool:
        return self._sections is not None and self._sections.has_left

    def _end_if_left(self) -> None:
        if self.has_left:
            raise SystemExit(STATUS)

    # --- weights ----------------------------------------------------------------------------------------------------

    def follow(self, module: nn.Module) -> None:
        """See :meth:`ReplicaMethod.follow`.

        Raises:
            ValueError: with ``lighthouse``, where :meth:`flush` does not communicate.
        """
        if self._sections is not None:
            raise ValueError(
                f"lighthouse={self.config.lighthouse!r}: a running average of the weights (EMA), as of "
                "EMAWeightAveraging, would be another one in each job, as an evaluation does not communicate: leave it "
                "out, or leave lighthouse out to have the replicas in this job."
            )
        super().follow(module)

    def flush(self) -> None:
        """See :meth:`ReplicaMethod.flush`; with ``lighthouse`` sets the weights to those of the last round."""
        if self._sections is None:
            super().flush()
            return
        if self.flushed:
            return
        self.synchronize()
        for tensors in self._replicas:
            tensors.swap_in_global_weights()
        self._non_trainable.swap_in_common()
        self.flushed = True

    def end(self) -> None:
        """Ends the training: sets the weights to the average of the replicas, if all others end, after no more steps.

        Otherwise they go on without this one, and its weights are those of the last round. A flush before is undone. A
        second call does nothing. Without ``lighthouse`` it is :meth:`flush`.
        """
        if self._sections is not None and self._sections.has_joined and not (self.has_left or self._has_ended):
            if self.flushed:  # as for the last validation, with the weights of the last round
                self.resume()
            self.synchronize()
            if any(tensors.diverged for tensors in self._replicas):
                self._sections.end(self._average_for_good)
                self._non_trainable.keep_average()
                self.flushed = False
            self._departure.notice.close()
            self._has_ended = True
        self.flush()

    def _average_for_good(self) -> None:
        """Consolidates the weights; as this rank's own ones are dropped, they stay if the replicas are grouped anew."""
        self._consolidate()
        for tensors in self._replicas:
            tensors.keep_average()

    def finish(self, before_update: Callable[[Optimizer], object]) -> None:
        self.end()

    def _together(self, section: Callable[[], object], of_step: int | None = None) -> None:
        if self._sections is None:
            section()
        else:
            starts = of_step is not None and self._units[of_step].starts_in(1)
            leaves_by = self._departure.deadline if starts and of_step == self._training_steps.last else None
            asks = of_step is None or starts
            self._sections.run(section, self.snapshot(of_step), asks=asks, leaves_by=leaves_by)

    def _check_jobs(self) -> None:
        if self.transport.world_size > 1:
            raise ValueError(
                f"lighthouse={self.config.lighthouse!r} makes each job a replica, and this job has "
                f"{self.transport.world_size} of them: start a process for each, or shard the model among all ranks of "
                "the job, or leave lighthouse out to have the replicas in this job."
            )

    def _detach(self, timeout_s: float) -> None:
        if self._sections is not None:
            self._sections.leave()
            self._departure.notice.close()
        super()._detach(timeout_s)
        # Without an error, others may still receive this replica's last messages.
        if self._sections is not None and not (self.has_left or is_normal_end(sys.exc_info()[1])):
            self._sections.close()
