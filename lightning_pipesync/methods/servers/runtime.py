"""SGD with parameter servers in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.buckets import buffer_reader, dense_strides, of_one_kind, restore_memory_format
from lightning_pipesync.core.fingerprints import marks_of, versions_of, written_since
from lightning_pipesync.core.held_weights import HeldWeights
from lightning_pipesync.core.parameters import NamedParameter, load_optimizer_state
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.methods.method import NETWORK_METRICS, MetricInfo, counted, parameters_of
from lightning_pipesync.methods.module_hook import hook_loading, modules_with
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.coordinator import COORDINATOR, Coordinator
from lightning_pipesync.methods.servers.learners import LEARNERS, Learner
from lightning_pipesync.methods.servers.messages import Flushed, Request, StatesRequest, Update
from lightning_pipesync.methods.servers.optimizer_states import ServedOptimizers
from lightning_pipesync.methods.servers.policies import Sequencer
from lightning_pipesync.methods.servers.router import MessageRouter
from lightning_pipesync.methods.servers.server import CenterServer, Server
from lightning_pipesync.methods.servers.shards import ServedShard, SharedBucket
from lightning_pipesync.methods.sync_method import SyncMethod

T = TypeVar("T")


class ParameterServer(SyncMethod):
    """SGD with parameter servers: learners push gradients at their own pace, and servers update the weights by them.

    The policy says when (lecture, "Synchronous SGD Variants", "Asynchronous SGD and Variants"). The servers are some of
    the ranks, or all, each with a share of the weights; they also train. They run the user's optimizer on their share,
    with the hyper-parameters that the learner with the newest gradient of an update had.

    A plain loop::

        sync = ParameterServer(model, optimizer)        # all ranks now have rank 0's weights
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            sync.step()                                 # in place of optimizer.step(): now the model has newer weights
        sync.flush()                                    # the same weights on all ranks; all of them call this
        validate(model)
        sync.detach()

    Ranks may take different numbers of steps between two calls of :meth:`flush`. A policy that cancels passes does so
    during a pass if that is in a closure: ``sync.step(lambda: optimizer.step(closure))``. The closure is then evaluated
    again, with newer weights. Otherwise the gradient of a cancelled pass is lost. Within a long computation outside of
    the layers, call :meth:`cancel_if_late` from time to time.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in
    :class:`ParameterServerConfig`.

    Attributes:
        only_serves: whether this rank takes no steps, with ``dedicated_servers=True``.
    """

    applies_grad = False  # the servers clip the mean
    name = "parameter_server"
    config_type = ParameterServerConfig
    metric_infos = MappingProxyType(
        {
            "updates": MetricInfo("updates that a rank's weights include", over_ranks="max"),
            "cancelled": MetricInfo("passes that a rank has cancelled so far"),
            "staleness": MetricInfo("that of all gradients so far, on average", "updates", "rank 0"),
            **NETWORK_METRICS,
        }
    )
    shown_metrics = MappingProxyType({"updates": "server_updates", "staleness": "staleness"})
    shards_optimizer_state = True

    config: ParameterServerConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        transport, config, kind = self.transport, self.config, self._learner_type
        self._roles = roles = config.roles(transport.world_size)
        self.only_serves = transport.rank not in roles.learners
        trained = [parameter for parameter in parameters if parameter.group]
        self._served = [(parameter.name, parameter.tensor) for parameter in trained]
        self._strides = [dense_strides(tensor) for _, tensor in self._served]  # what servers hold is in this order
        self._others = [parameter.tensor for parameter in parameters if not parameter.group]  # as those of a teacher
        self._marks = marks_of(self._others)
        self._buckets = [SharedBucket(kind, roles.num_servers, config) for kind in of_one_kind(trained)]
        self._router = router = MessageRouter(transport, roles, config.timeout_s)
        self._at_detach(router.close)
        self.data.ask = router.next_batch
        self._learner = kind(router, transport.rank, self._buckets, self.optimizers, self.user_steps, config)
        self._learner.after_fetch = self._note_weights
        self._weights_loaded = False
        self._loaded_optimizers: list[Optimizer] = []
        if roles.policy.cancels:
            self._remove_at_detach(self._learner.hook(self._module, parameters, lambda: self.syncing))
        self._serve()
        self._note_weights()
        served = modules_with(self._module, [tensor for _, tensor in self._served])
        self._remove_at_detach(hook_loading(self._after_loading, served, self._states.optimizers))

    def _serve(self) -> None:
        """Starts this rank's server, if it has one, and the coordinator, which is used on ``roles.coordinators``."""
        transport, config, router, roles = self.transport, self.config, self._router, self._roles
        num_servers, policy = roles.num_servers, roles.policy
        optimizers = self.optimizers if self._learner.outer is None else [self._learner.outer]
        shards = [
            ServedShard(bucket, transport.rank, optimizers[bucket.group[0]], config, num_servers)
            for bucket in (self._buckets if transport.rank < num_servers else ())
        ]
        served = () if self._learner.keeps_replica else optimizers
        servers, what = range(num_servers), "the states of the parameter servers' optimizers"
        ask = (lambda index: router.ask(StatesRequest(index), what, servers)) if roles.survives_loss else None
        self._states = ServedOptimizers(served, self._buckets, shards, num_servers, transport, ask)
        self._at_detach(lambda _: self._states.bring_back())
        self._server: Server | None = None
        if shards:
            make = partial(CenterServer, roles.force) if self._learner.keeps_replica else Server
            self._server = make(shards, num_servers, config, router.send, router.fail, self._states.keep)
            self._at_detach(self._server.close)
        everyone, predicts = range(transport.world_size), config.delay_compensation == "momentum"
        sequencer = Sequencer(policy, everyone, config.staleness_lr, predicts, range(roles.learners.start))
        followers = everyone if policy.cancels else everyone[:num_servers]
        reporting = num_servers - 1 if roles.survives_loss else 0
        if config.independent_shards:  # each server is its own coordinator
            followers, reporting = everyone[transport.rank : transport.rank + 1], 0
        self._coordinator = Coordinator(sequencer, router.send, roles.learners, followers, config, reporting)
        self._at_detach(lambda _: self._coordinator.close())
        router.start(self._coordinator, self._server, self._states.kept)

    def prepare_train_loader(
        self, loader: DataLoader[Any], seed: int = 0, to_device: Callable[[Any], Any] | None = None
    ) -> TrainLoader:
        """See :meth:`SyncMethod.prepare_train_loader`.

        Raises:
            ValueError: on every rank, also with ``dedicated_servers=True`` and batches that are not handed out.
        """
        if self.config.dedicated_servers and self.config.partition != "work_queue":
            raise ValueError(
                f"partition={self.config.partition!r} gives as many batches to all ranks, and with "
                "dedicated_servers=True some only serve: set partition='work_queue'."
            )
        return super().prepare_train_loader(loader, seed, to_device)

    @property
    def log(self) -> list[Update]:
        """All updates so far, with ``keep_log=True``, on rank 0.

        With ``independent_shards=True`` those of a server's own shard, on each rank that serves.
        """
        return self._coordinator.log

    # --- a step -----------------------------------------------------------------------------------------------------

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Has the servers read what was written within a closure: the gradient is pushed when the optimizer steps."""
        self._take_changes()

    def _complete(self, index: int, loss_scale: float | None) -> bool:
        """Returns whether the step is skipped, with a loss scaler and where all ranks take it together."""
        if loss_scale is None or not self._roles.policy.together:
            return False
        gradients = [p.grad for p in parameters_of(self.optimizers[index]) if p.grad is not None]
        finite = all(bool(torch.isfinite(grad).all()) for grad in gradients)
        [skips] = self._router.ask(Request.STEP if finite else Request.SKIP, "the gradients of all ranks")
        return bool(skips)

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        self._router.check()
        if self.only_serves:
            raise RuntimeError(
                f"Rank {self.transport.rank} only serves (dedicated_servers=True), and takes no steps: skip them if "
                "sync.only_serves, and call flush() with the others; or let partition='work_queue' give it no batches."
            )
        if self._has_new_parameters:
            raise RuntimeError(
                "Parameters were added to an optimizer after parameter servers had begun to train: give it all of them "
                "from the beginning, frozen ones, too."
            )
        self._take_changes()
        if self.flushed:
            self._learner.begin_from_flushed()
        result = self._learner.step(index, update)
        self._note_weights()
        self.flushed = False
        return result

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Makes the servers clip the mean gradient of the next update by its L2 norm.

        With ``policy="downpour"``, ``"easgd"`` or ``"diloco"``, and with ``independent_shards``, this rank's gradient
        is clipped.

        Returns:
            The norm of this rank's gradient, 0-dim; no rank has the mean.
        """
        if self._clips_own:
            return super().clip(max_norm, optimizer)
        self._reduce_to_clip(optimizer)
        self._learner.clipping.setdefault(self._index(optimizer), {})["max_norm"] = max_norm
        gradients = [p.grad for p in self._trained(optimizer) if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def clip_value(self, max_value: float, optimizer: Optimizer | None = None) -> None:
        """Makes the servers clip every value of the mean gradient of the next update to ``[-max_value, max_value]``."""
        if self._clips_own:
            super().clip_value(max_value, optimizer)
            return
        self._reduce_to_clip(optimizer)
        self._learner.clipping.setdefault(self._index(optimizer), {})["max_value"] = max_value

    def cancel_if_late(self) -> None:
        """Ends a pass in a closure if there are newer weights, and if it can be repeated; called at each layer."""
        self._learner.cancel_if_late()

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def diverged(self) -> bool:
        return self._learner.moves_weights and not self.flushed

    @property
    def in_lockstep(self) -> bool:
        return self._roles.policy.together

    @property
    def trains_written_weights(self) -> bool:
        return self._roles.policy.together  # otherwise each learner has weights of its own age

    @property
    def same_optimizer_states(self) -> bool:
        return not self._learner_type.owns_optimizer

    def follow(self, module: nn.Module) -> None:
        """Makes ``module``, a running average of the weights that this rank gets, the first learner's at a flush.

        Other ranks get other weights, or at other steps, unless ``policy="sync"``.
        """
        read_buffers = buffer_reader(module)
        self._followed.append(lambda: [*module.parameters(), *read_buffers()])

    @torch.no_grad()
    def flush(self) -> None:
        """Waits until all gradients are applied, and loads the servers' newest weights; a collective call.

        Pending gradients make an update even if they are too few. The buffers become those of the first learner, and so
        do parameters that no optimizer has, if it has changed them.
        With ``policy="easgd"`` :meth:`resume` restores this rank's replica.
        """
        self._router.check()
        self._take_changes()
        if not self.flushed:
            self._learner.keep_replica()
        self._learner.retire()
        # Not by a collective: where training survives a loss, a rank may be lost at any time, also the first learner.
        learners = self._roles.learners if self._roles.survives_loss else self._roles.learners[:1]
        buffers, own = self._shared_tensors(), list[Tensor | None]()
        if self.transport.rank in learners:
            marked = zip(self._others, marks_of(self._others), self._marks, strict=True)
            own = [tensor.cpu().clone() if now != then else None for tensor, now, then in marked]
            own += [buffer.cpu().clone() for buffer in buffers]
        held = HeldWeights.of_this_process(self.transport.rank, self._served)
        [shared] = self._router.ask(Flushed(held, own), "all ranks to compare their weights")
        for tensor, value in zip([*self._others, *buffers], shared, strict=True):
            if value is not None:
                tensor.copy_(value)
        self._note_weights()
        self.flushed = True

    def resume(self) -> None:
        """Continues from the flushed weights, with ``policy="easgd"`` from this rank's replica."""
        if self.flushed:
            self._take_written()
            self._learner.restore_replica()
        self.flushed = False

    def _take_changes(self) -> None:
        """Makes the servers read what was written to the weights, or loaded, since they sent them."""
        self._take_written()
        if self._loaded:
            self._reload()
            self._learner.begin_from_flushed()

    def _note_weights(self) -> None:
        self._versions = versions_of([tensor for _, tensor in self._served])

    def _take_written(self) -> None:
        """Makes the next step start from what all ranks have written to the weights since the servers sent them.

        Raises:
            RuntimeError: each learner has weights of its own age, which the servers would replace.
        """
        if self._learner.moves_weights or self._loaded:
            return
        written = written_since(self._versions, [tensor for _, tensor in self._served])
        if written and not (self._roles.policy.together or self.flushed):
            raise RuntimeError(
                f"{self._served[written[0]][0]} was written to, and with policy={self.config.policy!r} the weights are "
                "the servers', who would not learn of it: write to weights after flush(), as at the end of an epoch, "
                "and on all ranks; or set policy='sync'."
            )
        self._weights_loaded = bool(written)

    @property
    def _loaded(self) -> bool:
        """Whether weights or an optimizer's state were loaded, from which the next step starts."""
        return self._weights_loaded or bool(self._loaded_optimizers)

    def _after_loading(self, loaded: nn.Module | Optimizer, *_: object) -> None:
        """Makes the next step start from the loaded weights and optimizer states."""
        if isinstance(loaded, Optimizer):
            self._loaded_optimizers.append(loaded)
        elif not self._weights_loaded:
            self._weights_loaded = True
            self._learner.drop_residuals()

    def _reload(self) -> None:
        """Makes the servers read what was loaded, weights or states or both; a collective call.

        If weights were loaded, gradients of those before have no effect then. If some ranks have loaded nothing, all
        raise an error.
        """
        weights, optimizers = self._weights_loaded, self._loaded_optimizers
        self._weights_loaded, self._loaded_optimizers = False, []
        for (_, tensor), strides in zip(self._served, self._strides, strict=True):
            restore_memory_format(tensor, strides)
        self._learner.retire_to_reload(weights)
        if self._server is not None:
            self._server.reload(lambda: self._states.read_loaded(weights, optimizers))
        self._learner.retire()  # waits until all servers have read

    # --- state ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        counts = {"updates": float(self._learner.version), "cancelled": float(self._learner.num_cancelled)}
        if self.transport.rank == COORDINATOR:
            counts["staleness"] = self._coordinator.mean_staleness
        return {**counts, **super().metrics()}

    def summary(self, num_steps: int, before: Mapping[str, float]) -> str:
        updates, staleness = self._learner.version - before["updates"], self._coordinator.mean_staleness
        steps = counted(num_steps, "step")
        return f"{counted(updates, 'update')} in {steps} of a rank, with a mean staleness of {staleness:.2g}"

    def optimizer_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Returns what ``optimizer.state_dict()`` would be without servers, on every rank.

        A collective call, unless training survives the loss of a rank: then it is what it was at the last
        :meth:`flush`.

        Raises:
            RuntimeError: a server is lost.
        """
        index = self._index(optimizer)
        one = self.optimizers[index]
        if self._learner.owns_optimizer or any(one is loaded for loaded in self._loaded_optimizers):
            return one.state_dict()
        return self._states.state_dict_of(index)

    def return_optimizer_states(self) -> None:
        """Sets the whole state of the optimizer, which :meth:`detach` would drop; as :meth:`optimizer_state_dict`."""
        if not self._learner.owns_optimizer:
            self._states.restore_states(but=self._loaded_optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters and residuals of this rank, after :meth:`flush`; with EASGD, its replica, too.

        With DiLoCo also the state of the outer optimizer, by a call as :meth:`optimizer_state_dict`.
        """
        outer = {} if self._learner.outer is None or self._loaded else {"outer": self._states.state_dict_of(0)}
        return {**self._learner.state_dict(), **outer, "coordinator": self._coordinator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank, after weights and optimizers were loaded.

        A collective call.
        """
        self._learner.load_state_dict(state)
        versions = self._learner.versions
        version = versions[self.transport.rank] if self._server is not None else max(versions)
        self._router.newest = max(versions)
        self._coordinator.load_state_dict(state["coordinator"], version)
        if self._server is not None:
            self._server.version = version
        self._weights_loaded = True  # and residuals are those of these weights
        if self._learner.outer is not None and "outer" in state:
            load_optimizer_state(self._learner.outer, state["outer"])
        self._reload()
        self._learner.restore_replica()

    @property
    def _clips_own(self) -> bool:
        """Whether a rank clips its own gradient: no server makes an update of several, or has the norm of all."""
        return self._learner.moves_weights or self.config.independent_shards

    @property
    def _learner_type(self) -> type[Learner]:
        return LEARNERS.get(self.config.policy, Learner)

    def _check_support(self) -> None:
        kind, num_servers = self._learner_type, self.config.roles(self.transport.world_size).num_servers
        if kind.moves_weights and len(self.optimizers) > 1:
            raise ValueError(
                f"policy={self.config.policy!r} takes the steps of one optimizer, and there are "
                f"{len(self.optimizers)}: choose another policy."
            )
        for optimizer in () if kind.owns_optimizer else self.optimizers:
            self.config.check_optimizer(optimizer, num_servers)
        if self._sharded is not None:
            raise ValueError(
                "A parameter server answers each rank by itself, so that the shards of a replica would be of different "
                "weights: use another method, or give every rank the whole model."
            )
