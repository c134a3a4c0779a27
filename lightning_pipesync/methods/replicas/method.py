"""Base class of the methods whose ranks train replicas of the weights."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import MIB, buffer_reader
from lightning_pipesync.core.dtensors import is_sharded, local_of
from lightning_pipesync.core.faults.shutdown import AFTER_ERROR_S
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import is_compiled
from lightning_pipesync.methods.method import NETWORK_METRICS, MetricInfo, group_members
from lightning_pipesync.methods.module_hook import hook_loading, modules_with
from lightning_pipesync.methods.replicas.averages import Averages
from lightning_pipesync.methods.replicas.flags import LOADED, check_flags, exchange_flags
from lightning_pipesync.methods.replicas.groups import check_group_size, number_of_participants, replicas_of
from lightning_pipesync.methods.replicas.non_trainable import NonTrainableTensors
from lightning_pipesync.methods.replicas.overlap import ForwardOverlap
from lightning_pipesync.methods.replicas.policy import AveragingPolicy
from lightning_pipesync.methods.replicas.replica import Replica
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from lightning_pipesync.methods.settings import check_saved
from lightning_pipesync.methods.sync_method import SyncMethod

T = TypeVar("T")


@dataclass
class Changes:
    """What has changed this rank's weights besides steps."""

    loaded: bool = False  # weights were loaded since the last step
    loaded_since_flush: bool = False  # they were loaded while they were the consolidated ones
    followers: bool = False  # the parameters of modules that are followed may differ between ranks


class ReplicaMethod(SyncMethod):
    """Each rank trains a replica of the weights with an optimizer of its own; consolidated weights are their average.

    A method implements :meth:`_policy`. Arguments, errors and further calls are those of :class:`SyncMethod`.
    """

    metric_infos = MappingProxyType(
        {
            **NETWORK_METRICS,
            "mib_between_groups": MetricInfo("`mib_sent` without what was sent within groups", "MiB", "max"),
        }
    )

    updates_by_own_steps = True
    resumes_with_own_weights = True

    config: ReplicaSettings

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        self._parameters, self._has_warned = parameters, False
        self._place = self.transport.rank, self.transport.world_size  # of which the replicas are
        self._replicas: list[Replica] = []
        self._at_detach(lambda _: self._close_replicas())
        self._replicas = self._new_replicas()
        others = [parameter.tensor for parameter in parameters if parameter.group is None]
        self._non_trainable = self._non_trainable_tensors(others, self._module)
        self._followers: list[NonTrainableTensors] = []
        self._changes = Changes()
        overlaps = self.config.overlaps_forward and self.transport.world_size > 1 and not is_compiled(self._module)
        buckets = [replica.averages.buckets for replica in self._replicas]
        self._overlap = ForwardOverlap(self._module, parameters, buckets, self.transport) if overlaps else None
        if self._overlap is not None:
            self._at_detach(self._overlap.close)
        compared = [b for b in chain(*buckets) if b.global_flat is not None or self.config.overlap_steps]
        weights = [tensor for bucket in compared for tensor in bucket.tensors]
        # Not of a teacher, into which the trained weights may be loaded at every step.
        self._remove_at_detach(hook_loading(self._after_loading, modules_with(self._module, weights)))

    @abstractmethod
    def _policy(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> AveragingPolicy:
        """Returns what decides when the averages of an optimizer's parameters start."""

    def _shape_settings(self) -> dict[str, Any]:
        """Returns the settings that determine the structure of :meth:`state_dict`, which a method extends."""
        config = self.config
        structural = ("bucket_mb", "fragments", "ranks_per_replica", "warmup_steps")
        settings = {name: getattr(config, name) for name in structural if name in config.__dataclass_fields__}
        if self.transport.shards is not None and "ranks_per_replica" in settings:  # set, or left to the mesh
            settings["ranks_per_replica"] = self.transport.ranks_per_replica
        if config.uses_error_feedback or any(
            bucket.has_outer_shard for replica in self._replicas for bucket in replica.averages.buckets
        ):
            settings["topology"] = str(self.transport.topology)  # which says whose residuals and outer states these are
        return {"compression": str(config.compression), "error_feedback": config.uses_error_feedback, **settings}

    def _transport_settings(self) -> dict[str, Any]:
        size = self.config.ranks_per_replica
        if self.config.lighthouse is not None and self._mesh is None and is_sharded(self._module):
            return {"replicas": [dist.get_rank()]}  # the job has one, and a mesh of one dimension does
        if self._mesh is not None:
            by_mesh = dist.get_world_size() // self._mesh.size()
            if size not in (1, by_mesh):
                raise ValueError(
                    f"ranks_per_replica={size!r}, and by the device mesh a replica has {by_mesh} ranks: set "
                    f"ranks_per_replica={by_mesh}, or leave it out with replicas=."
                )
            return self.config.arrangement
        if size == 1:
            return self.config.arrangement
        check_group_size(size, dist.get_world_size())
        return {"topology": "rows", "torus_columns": size}

    def _check_support(self) -> None:
        share, number = self.config.participation, replicas_of(self.transport).world_size
        if number_of_participants(share, number) == 0:
            raise ValueError(
                f"participation={share!r} of {number} replicas gives none to average: set at least {1 / number:.3g}."
            )
        if self.config.lighthouse is not None:
            self._check_jobs()
        super()._check_support()

    def _check_jobs(self) -> None:
        """Raises a ValueError if the replicas cannot be jobs of their own."""
        raise ValueError(
            f"lighthouse={self.config.lighthouse!r} has no effect on {type(self).__name__}: let it inherit from "
            "ElasticReplicaMethod in place of ReplicaMethod, or leave lighthouse out."
        )

    @property
    def same_optimizer_states(self) -> bool:
        return False

    @property
    def diverged(self) -> bool:
        """Whether this rank's weights may differ from those of other ranks."""
        return not self.flushed and any(replica.averages.diverged for replica in self._replicas)

    # --- a step -----------------------------------------------------------------------------------------------------

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Averages the gradient in a warm-up or a group; adopts weights that were consolidated or loaded."""
        self._warn_of_added_parameters()
        self._replicas[index].average_gradient()
        self._go_on_from_average()  # at which the gradient was computed
        if self._changes.loaded:
            self._together(self._reset_global_weights)

    def _complete(self, index: int, loss_scale: float | None) -> bool:
        self.synchronize()  # before the update, also of weights that the last forward pass did not need
        return self._replicas[index].complete_gradient()

    def _skip(self, index: int) -> None:
        self._replicas[index].policy.skip_step()

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates this rank's weights, and averages what is due.

        Raises:
            RuntimeError: ``update`` was given and did not call :meth:`reduce` after the last backward pass; the ranks
                have not taken, or skipped, the same steps; or a peer is lost.
        """
        replica = self._replicas[index]
        self._go_on_from_average()  # a flush may have come after the gradient was reduced
        with replica.in_step():
            result = self.user_steps.update_own(index, update)  # SelSync, Algorithm 1, line 9
        if replica.meets_next:
            self._together(partial(self._end_step, index), of_step=index)  # lines 15 to 17
            self._non_trainable.keep_average()
        else:
            self._end_step(index)
        self._changes.followers |= any(replica.averages.diverged for replica in self._replicas)
        if self._overlap:
            self._overlap.end_step()
        if self._followers:  # a running average reads the averaged weights
            self.synchronize()
        return result

    def _warn_of_added_parameters(self) -> None:
        if self._has_warned or not self._has_new_parameters:
            return
        members = (self._agreed_members, group_members(self.optimizers))
        before, now = ({one for groups in found for group in groups for one in group} for found in members)
        if not now <= before:
            self._has_warned = True
            warnings.warn(
                f"Parameters were added to an optimizer after {type(self).__name__} was attached: their weights are "
                "averaged with the others', without codec and outer step, and their gradients never. Give the "
                "optimizer all parameters from the start, those of frozen layers, too.",
                stacklevel=2,
            )

    def _go_on_from_average(self) -> None:
        """Ends a flush that nobody has undone: the replicas continue from the consolidated weights.

        Averages under way are applied when they are due, as after :meth:`resume`.
        """
        if self.flushed:
            for replica in self._replicas:
                replica.averages.move_starts()
            self._end_flush(keeps_average=True)

    def _end_step(self, index: int) -> None:
        """Ends the step of an optimizer; at the end of a round, averages the other tensors, too."""
        if self._overlap is not None:
            self._replicas[index].end_step(start=partial(self._start_under_forward, index))
        elif self._replicas[index].end_step():
            self._average_others(index)

    def _start_under_forward(self, index: int) -> None:
        assert self._overlap is not None
        self.synchronize()  # another optimizer's averages: one thread at a time issues collectives
        self._average_others(index)
        self._overlap.start(index)

    def _average_others(self, index: int) -> None:
        """Averages what no optimizer updates at the end of an optimizer's round."""
        self._non_trainable.average(self.config.undoes_averages, members=self._replicas[index].neighborhood)

    def synchronize(self) -> None:
        """Waits for the average of the last step, if it runs under the next forward pass; not a collective call.

        Raises:
            RuntimeError: a peer is lost.
        """
        if self._overlap:
            try:
                self._overlap.wait()
            except RuntimeError:
                for replica in self._replicas:
                    replica.averages.diverged = True  # not all of the average has arrived
                raise

    def _together(self, round_: Callable[[], object], of_step: int | None = None) -> None:
        """Runs a part of a flush, or of the step of an optimizer, in which all ranks communicate."""
        round_()

    # --- weights ----------------------------------------------------------------------------------------------------

    def follow(self, module: nn.Module) -> None:
        """Makes :meth:`flush` also average ``module``, a running average of this rank's weights (EMA).

        As averages commute, it becomes the running average of the averaged weights. :meth:`resume` does not undo that.
        A step then waits for its average, which the running average reads.
        """
        self._followers.append(self._non_trainable_tensors([local_of(p) for p in module.parameters()], module))

    def flush(self) -> None:
        """Sets the weights and buffers to the average of the replicas, which is exact with any codec.

        Raises:
            RuntimeError: another rank takes a step, or has skipped other steps than this one; or a peer is lost.
        """
        if self.flushed:
            return
        self.synchronize()
        with self.transport.traffic.beside_steps():
            self._together(self._consolidate)
        self._compare_weights()
        for follower in self._followers:
            follower.keep_average()

    def give_up(self, timeout_s: float = AFTER_ERROR_S) -> str:
        lost = 0 if self._overlap is None else self._overlap.give_up(timeout_s)
        if not lost and not self.diverged:
            return "the average of all replicas"
        of_rank = f"those of rank {dist.get_rank()}'s replica, which differ from others'"
        return f"{of_rank}, in {lost} buckets without the last average" if lost else of_rank

    def resume(self) -> None:
        """Restores this rank's replica, except the tensors that were written to since the flush."""
        self._end_flush(keeps_average=False)

    def return_optimizer_states(self) -> None:
        """Waits for the average of the last step: the optimizers already have their states."""
        self.synchronize()

    def _consolidate(self) -> None:
        for replica in self._replicas:
            replica.check_consolidation()
        for replica in self._replicas:
            replica.averages.swap_in_average()
        self._non_trainable.swap_in_average()
        for follower in self._followers:
            follower.average(self.config.undoes_averages, with_parameters=self._changes.followers)
        self._changes.followers = False
        self.flushed = True

    def _after_loading(self, *_: Any) -> None:
        """Notes that weights were loaded, which differ from the global ones."""
        if self.flushed:
            self._changes.loaded_since_flush = True
        else:
            self._changes.loaded = True

    def _end_flush(self, keeps_average: bool) -> None:
        """Continues from the average, or restores this rank's replica except tensors that were written to."""
        if self._changes.loaded_since_flush:  # another swap may have replaced what was loaded
            self._changes.loaded |= any(replica.averages.written_since_swap() for replica in self._replicas)
        self._changes.loaded_since_flush = False
        averages = [replica.averages for replica in self._replicas]
        swapped: list[Averages | NonTrainableTensors] = [*averages, self._non_trainable]
        for tensors in swapped:
            if keeps_average:
                tensors.keep_average()
            else:
                tensors.swap_back()
        self.flushed = False

    def _reset_global_weights(self) -> None:
        """Makes weights that were loaded since the last step the global ones; a collective call."""
        for replica in self._replicas:
            replica.drop_averages()
        self._changes.loaded = False
        check_flags(exchange_flags(self.transport, LOADED))
        for replica in self._replicas:
            replica.averages.reset_global()

    def metrics(self) -> dict[str, float]:
        """Returns those of :meth:`SyncMethod.metrics`; with groups also ``mib_between_groups``.

        That is ``mib_sent`` without the exchanges within groups.
        """
        metrics = super().metrics()
        if self.transport.row is not None:
            in_group = self.transport.row.bytes_sent
            metrics["mib_between_groups"] = (self.transport.traffic.total_bytes_sent - in_group) / MIB
        return metrics

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's replica, optimizer states, counters and codec residuals.

        Once an error has told that a peer is lost, it is not a collective call: averages that can no longer arrive
        count as not started, and the global weights are the last that all ranks agreed on.
        """
        with self.transport.watch.despite_loss():
            self.synchronize()
        return {
            "replicas": [replica.state_dict() for replica in self._replicas],
            "untrained": self._non_trainable.state_dict(),
            "traffic": self.transport.traffic.state_dict(),
            "injection": self.data.injection.state_dict() if self.data.injection else {},
            "settings": self._shape_settings(),
            "place": list(self._place),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank, after the consolidated weights were loaded.

        Raises:
            ValueError: the state was saved with other settings that determine its structure, or with another number of
                ranks.
        """
        present = self._shape_settings()
        check_saved(state["settings"], present, "to start from the averaged weights")
        self._check_place(*state["place"])
        self.synchronize()
        for replica, saved in zip(self._replicas, state["replicas"], strict=True):
            replica.load_state_dict(saved)
        self._non_trainable.load_state_dict(state["untrained"])
        self.flushed = self._changes.loaded = self._changes.loaded_since_flush = False
        self.transport.traffic.load_state_dict(state["traffic"])
        if self.data.injection and state["injection"]:
            self.data.injection.load_state_dict(state["injection"])

    def _check_place(self, rank: int, world_size: int) -> None:
        """Raises a ValueError if a state of ``rank`` of ``world_size`` ranks cannot be loaded."""
        present = self.transport.world_size
        if world_size != present:
            raise ValueError(
                f"Rank {self.transport.rank} loads the state of rank {rank} of {world_size}, and there are {present}: "
                "resume with as many (replicas that were jobs of their own: with lighthouse). To start from the "
                "averaged weights, do not load the state; in an adapter's checkpoint, remove the key 'pipesync'."
            )

    def _close_replicas(self) -> None:
        for replica in self._replicas:
            replica.close()

    def _new_replicas(self) -> list[Replica]:
        """Returns the replica of each optimizer, among the ranks of the transport."""
        # Of several optimizers the gradients may become ready in another order on another rank.
        starts_in_pass = (lambda _: self.syncing) if len(self.optimizers) == 1 else None
        replicas = []
        for index, optimizer in enumerate(self.optimizers):
            parameters = self._ordered([p for p in self._parameters if p.group and p.group[0] == index])
            policy = self._policy(optimizer, parameters)
            replicas.append(Replica(optimizer, parameters, self.config, self.transport, policy, starts_in_pass))
        return replicas

    def _ordered(self, parameters: list[NamedParameter]) -> list[NamedParameter]:
        """Returns parameters, given layer by layer, in the order in which buckets are filled."""
        return parameters

    def _non_trainable_tensors(self, parameters: list[Tensor], module: nn.Module) -> NonTrainableTensors:
        return NonTrainableTensors(parameters, buffer_reader(module), self.transport, self.config.bucket_mb)
