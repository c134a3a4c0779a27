"""Replica methods whose replicas are jobs of their own, which come and go (``lighthouse=``)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.comm.line import Line
from lightning_pipesync.core.consistency import describe, describe_optimizers, raise_if_different
from lightning_pipesync.core.faults.errors import is_normal_end
from lightning_pipesync.core.faults.notice import STATUS
from lightning_pipesync.core.parameters import NamedParameter, load_optimizer_state
from lightning_pipesync.core.torch_private import foreach_copy_
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.methods.hyperparameters import current
from lightning_pipesync.methods.method import MetricInfo
from lightning_pipesync.methods.replicas.membership import Snapshot, resharded, whole_state, zeroed
from lightning_pipesync.methods.replicas.method import Changes, ReplicaMethod
from lightning_pipesync.methods.replicas.replica import TrainingSteps
from lightning_pipesync.methods.replicas.rounds import Departure, QuorumRounds
from lightning_pipesync.methods.settings import config_from

T = TypeVar("T")
log = logging.getLogger(__name__)


class ElasticReplicaMethod(ReplicaMethod):
    """A replica method whose replicas can be jobs of their own; see :class:`ReplicaMethod`.

    With ``lighthouse`` the ranks of this job have one replica, and the other replicas are jobs that come and go. Then
    the consolidated weights are the agreed ones, of the last round, and :meth:`flush` does not communicate. Its
    policies may communicate in :meth:`AveragingPolicy.end_step` only, and only in steps for which ``may_start`` is
    True. :class:`QuorumRounds` says when a round is undone, or replicas come or leave. A checkpoint of a replica has
    its part of the outer state alone.
    """

    metric_infos = MappingProxyType(
        {
            **ReplicaMethod.metric_infos,
            "replicas": MetricInfo("replicas in the last round, with `lighthouse`", over_ranks="same"),
        }
    )

    _rounds: QuorumRounds | None = None
    _departure: Departure  # with rounds
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
        self._resumed: tuple[int, int] | None = None  # k, n: by a checkpoint of the k-th of n, until the first step
        self._handed: dict[str, Any] = {}  # what is handed over besides this method's state
        self._received: dict[str, dict[str, Any]] = {}  # of that what nobody has asked for yet
        self._waiting: list[int] = []  # ranks of new replicas that wait for it
        config, self._training_steps = self.config, TrainingSteps(len(self.optimizers))
        self.data.elastic = config.lighthouse is not None
        if config.lighthouse is not None:
            self._rounds = QuorumRounds(self, config.lighthouse, config.num_replicas or 1, config.timeout_s)
            self._departure = Departure(self._rounds.job.greatest)
            self.data.between_batches = self._end_if_left

    def metrics(self) -> dict[str, float]:
        """Returns those of :meth:`ReplicaMethod.metrics`; with ``lighthouse`` also ``replicas``, how many there are."""
        number = {} if self._rounds is None else {"replicas": self.transport.world_size}
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
        if self._rounds is None or self._rounds.has_joined:
            return
        for replica in self._replicas if self._resumed is None else []:
            replica.averages.set_global()
        self._changes.loaded = False
        self._rounds.join()
        self._departure.notice.listen()

    def prepare_train_loader(
        self, loader: DataLoader[Any], seed: int = 0, to_device: Callable[[Any], Any] | None = None
    ) -> TrainLoader:
        """See :meth:`SyncMethod.prepare_train_loader`; replicas that come and go divide what is left of an epoch."""
        self.join()
        return super().prepare_train_loader(loader, seed, to_device)

    def _begin(self) -> None:
        super()._begin()
        if self._rounds is not None and not self._rounds.has_joined:
            raise RuntimeError(
                f"{type(self).__name__} has not joined the other replicas: call join() before the first forward pass, "
                "after loading a checkpoint."
            )

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        self._resumed, self._has_ended = None, False
        begins = self._training_steps.take_part(index)
        if self._rounds is not None:
            self._end_if_left()
            self._rounds.go_on()
            if begins:
                self._departure.begin_step(self._replicas[self._training_steps.last].starts_in)
        super()._reduce(index, loss_scale)

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        result = super()._step(index, update)
        if self._rounds is None:
            return result
        # While an average is under way, the others would wait for this replica.
        is_under_way = any(replica.averages.is_under_way for replica in self._replicas)
        if self._departure.is_now and index == self._training_steps.last and not (self.has_left or is_under_way):
            self._rounds.leave_now()
        if self.has_left and dist.get_rank() == 0:
            log.warning(f"This replica was asked to leave, and has left after {self.num_rounds} rounds.")
        return result

    @property
    def num_steps(self) -> int:
        """Number of steps of the first optimizer since the start of the training, also before this process started."""
        return self._replicas[0].num_steps

    @property
    def steps_of_optimizers(self) -> list[int]:
        """Number of steps of each optimizer, in the same way."""
        return [replica.num_steps for replica in self._replicas]

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the first optimizer."""
        return self._replicas[0].num_rounds

    # --- a round that may be undone, and other replicas after it ------------------------------------------------------

    def launch(self, waits: bool = False) -> None:
        """Sends what averages that have started in a round send under the next steps, or ``waits`` for them."""
        for replica in self._replicas:
            replica.averages.launch()
        for replica in self._replicas if waits else ():
            replica.averages.settle()

    def undo_averages(self) -> None:
        """Restores the tensors that no optimizer updates; not a collective call."""
        self._non_trainable.undo_average()

    def snapshot(self, of_step: int | None = None) -> Snapshot:
        """Returns the state, or of weights only what the end of the next step of an optimizer may change."""
        replicas = []
        for index, replica in enumerate(self._replicas):
            buckets = None if of_step is None else replica.changed_next if index == of_step else ()
            replicas.append(replica.snapshot(buckets))
        return Snapshot(*self._place, replace(self._changes), replicas)

    def completed(self, snapshot: Snapshot) -> Snapshot:
        """Returns a snapshot with the present weights in place of those that it lacks, as they have not changed."""
        replicas = [
            {**saved, "weights": replica.averages.completed(saved["weights"])}
            for replica, saved in zip(self._replicas, snapshot.replicas, strict=True)
        ]
        return replace(snapshot, replicas=replicas)

    def gathered_snapshot(self, keeper: int) -> Snapshot:
        """Returns a snapshot with the outer state of all shards, which rank ``keeper`` has alone; a collective call."""
        rank, world_size = self._place

        def gathered(numel: int, outer: Any) -> Any:
            whole = whole_state(rank, world_size, self.transport, numel, outer)
            return whole if rank == keeper else zeroed(numel, whole)

        with self.transport.traffic.beside_steps():
            return replace(self.snapshot().with_outer_states(gathered), rank=0, world_size=1)

    def regroup(self, line: Line, snapshot: Snapshot, first: int, new: Sequence[int]) -> None:
        """Continues from ``snapshot`` with the replicas of ``line``, on which it exchanges; a collective call of them.

        The ranks ``new`` of it continue from the snapshot of ``first``. Averages under way are dropped, and a lossy
        codec's residuals start at zero.
        """
        self._waiting = []
        is_new = line.rank in new
        if is_new:
            snapshot = self._take_over(self.transport.receive_state(first), first)
        elif line.rank == first and new:
            handover = self._handover(snapshot)
            for rank in new:
                self.transport.send_state(handover, rank)
            self._waiting = list(new)
            if self._resumed is not None:
                self.transport.gather_objects(self._resumed)
        reshard = partial(resharded, snapshot.rank, snapshot.world_size, self.transport)
        with self.transport.traffic.beside_steps():
            present = snapshot.with_outer_states(reshard)
        # All have arrived: if one is lost before, the replicas stay as they are.
        self._close_replicas()
        self._replicas, self._place = self._new_replicas(), (line.rank, line.size)
        for replica, saved in zip(self._replicas, present.replicas, strict=True):
            replica.restore(saved)
        self._changes = replace(snapshot.changes)
        if new:
            self._resumed = None

    # --- what is handed over ----------------------------------------------------------------------------------------

    def hand_over(self, **parts: Any) -> None:
        """Adds ``parts``, such as a scheduler, to what a new replica gets from another one: their ``state_dict()``.

        It is taken at the beginning of a step. In a replica that is new the state is loaded at once.
        """
        self._handed |= parts
        for name in self._received.keys() & parts.keys():
            parts[name].load_state_dict(self._received.pop(name))

    def send_rest(self) -> None:
        """Sends new replicas what is handed over besides the method's state, as it is between two steps.

        Hyper-parameters are too: a scheduler has changed them since the round.
        """
        if not self._waiting:
            return
        rest = {
            "parts": {name: part.state_dict() for name, part in self._handed.items()},
            "groups": [current(optimizer) for optimizer in self.optimizers],
        }
        while self._waiting:
            self.transport.send_state(rest, self._waiting.pop())

    def receive_rest(self, first: int) -> None:
        """Receives from a replica what it hands over besides the method's state."""
        rest = self.transport.receive_state(first)
        self._received = rest["parts"]
        self.hand_over(**self._handed)
        for optimizer, groups in zip(self.optimizers, rest["groups"], strict=True):
            for group, hyperparameters in zip(optimizer.param_groups, groups, strict=True):
                group.update(hyperparameters)

    def _handover(self, snapshot: Snapshot) -> dict[str, Any]:
        """Returns what a replica that is new gets from this one."""
        return {
            "described": self._described(begins=not self.num_steps),
            "tensors": [tensor.detach() for tensor in self._all_tensors()],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "data": self.data.position(),
            "resumed": self._resumed,
            "snapshot": {**vars(snapshot), "changes": asdict(snapshot.changes)},
        }

    @torch.no_grad()
    def _take_over(self, handover: dict[str, Any], first: int) -> Snapshot:
        """Takes over the state of replica ``first``; returns the snapshot to continue from.

        Keeps its own, if both have loaded what they had after the same step.

        Raises:
            ValueError: this replica has other settings, or another model.
        """
        replicas, own = handover["snapshot"]["replicas"], self.snapshot()
        begins = not replicas[0]["steps"][0]
        raise_if_different(handover["described"], self._described(begins), self.transport.rank)
        if handover["resumed"]:
            is_same = [replica["steps"] for replica in replicas] == [replica["steps"] for replica in own.replicas]
            is_same = is_same and self._resumed is not None and self._resumed[1] == handover["resumed"][1]
            parts = self.transport.gather_objects(self._resumed if is_same else None)
            if is_same and self._resumed not in (parts[first], *parts[: self.transport.rank]):  # no other has its part
                self.data.go_to(handover["data"])
                return own
        foreach_copy_(self._all_tensors(), handover["tensors"])
        for optimizer, state in zip(self.optimizers, handover["optimizers"], strict=True):
            load_optimizer_state(optimizer, state)
        self._non_trainable.mark_common()
        self.data.go_to(handover["data"])
        saved = handover["snapshot"]
        return Snapshot(**{**saved, "changes": Changes(**saved["changes"])}).with_outer_states(zeroed)

    def _described(self, begins: bool) -> list[tuple[str, str]]:
        """Describes what all replicas have in common: hyper-parameters only when the training begins."""
        classes, hyperparameters = describe_optimizers(self.optimizers)
        return [
            *describe(self.config, self._parameters, self._module),
            *classes,
            *(hyperparameters if begins else []),
        ]

    def _all_tensors(self) -> list[Tensor]:
        return [*(parameter.tensor for parameter in self._parameters), *self._read_buffers()]

    # --- a replica that leaves --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Asks this replica to leave: after the next round, if that comes within 20 seconds, otherwise at once.

        May be called by a signal's handler, on any rank of the job. SIGTERM does the same, unless the program has a
        handler of its own. When the replica has left, the next batch of a prepared loader, or the next step, raises
        ``SystemExit(143)`` on all ranks of the job: catch it to save a checkpoint. Does nothing without ``lighthouse``.
        """
        if self._rounds is not None:
            self._departure.notice.give()

    def handle_sigterm(self, number: int, frame: Any) -> bool:
        if self._rounds is None:
            return False
        if not self._rounds.has_joined:  # it waits for the others, who may never come
            raise SystemExit(STATUS)
        self._departure.notice.handle(number, frame)
        return True

    @property
    def has_left(self) -> bool:
        return self._rounds is not None and self._rounds.has_left

    def _end_if_left(self) -> None:
        if self.has_left:
            raise SystemExit(STATUS)

    # --- weights ----------------------------------------------------------------------------------------------------

    def follow(self, module: nn.Module) -> None:
        """See :meth:`ReplicaMethod.follow`.

        Raises:
            ValueError: with ``lighthouse``, where :meth:`flush` does not communicate.
        """
        if self._rounds is not None:
            raise ValueError(
                f"lighthouse={self.config.lighthouse!r}: a running average of the weights (EMA), as of "
                "EMAWeightAveraging, would be another one in each job, as an evaluation does not communicate: leave it "
                "out, or leave lighthouse out to have the replicas in this job."
            )
        super().follow(module)

    def flush(self) -> None:
        """See :meth:`ReplicaMethod.flush`; with ``lighthouse`` sets the weights to those of the last round."""
        if self._rounds is None:
            super().flush()
            return
        if self.flushed:
            return
        self.synchronize()
        for replica in self._replicas:
            replica.averages.swap_in_global()
        self._non_trainable.swap_in_common()
        self.flushed = True

    def end(self) -> None:
        """Ends the training: sets the weights to the average of the replicas, if all others end, after no more steps.

        Otherwise they go on without this one, and its weights are those of the last round. A flush before is undone. A
        second call does nothing. Without ``lighthouse`` it is :meth:`flush`.
        """
        if self._rounds is not None and self._rounds.has_joined and not (self.has_left or self._has_ended):
            if self.flushed:  # as for the last validation, with the weights of the last round
                self.resume()
            self.synchronize()
            if any(replica.averages.diverged for replica in self._replicas):
                with self.transport.traffic.beside_steps():
                    self._rounds.end(self._average_for_good)
                self._non_trainable.keep_average()
                self.flushed = False
            self._departure.notice.close()
            self._has_ended = True
        self.flush()

    def _average_for_good(self) -> None:
        """Consolidates the weights; as this rank's own ones are dropped, they stay if the replicas are grouped anew."""
        self._consolidate()
        for replica in self._replicas:
            replica.averages.keep_average()

    def finish(self, before_update: Callable[[Optimizer], object]) -> None:
        self.end()

    def _together(self, round_: Callable[[], object], of_step: int | None = None) -> None:
        if self._rounds is None:
            round_()
        else:
            starts = of_step is not None and self._replicas[of_step].starts_in(1)
            leaves_by = self._departure.deadline if starts and of_step == self._training_steps.last else None
            asks = of_step is None or starts
            self._rounds.run(round_, self.snapshot(of_step), asks=asks, leaves_by=leaves_by)

    def _check_jobs(self) -> None:
        if self.transport.world_size > 1:
            raise ValueError(
                f"lighthouse={self.config.lighthouse!r} makes each job a replica, and this job has "
                f"{self.transport.world_size} of them: start a process for each, or shard the model among all ranks of "
                "the job, or leave lighthouse out to have the replicas in this job."
            )

    def _detach(self, timeout_s: float) -> None:
        if self._rounds is not None:
            self._rounds.close(ends_waits=False)
            self._departure.notice.close()
        super()._detach(timeout_s)
        # Without an error, others may still receive this replica's last messages.
        if self._rounds is not None and not (self.has_left or is_normal_end(sys.exc_info()[1])):
            self._rounds.close()

    # --- state ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`ReplicaMethod.load_state_dict`; with ``lighthouse`` before :meth:`join`."""
        super().load_state_dict(state)
        if self.config.lighthouse is not None:
            self._place = self._resumed = tuple(state["place"])

    def _check_place(self, rank: int, world_size: int) -> None:
        if self.config.lighthouse is None:  # otherwise the outer state is divided anew
            super()._check_place(rank, world_size)
