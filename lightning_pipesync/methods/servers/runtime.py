"""SGD with parameter servers in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.buckets import buffer_reader
from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import mark_stepped
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.methods.gradients.hyperparameters import current
from lightning_pipesync.methods.gradients.module_hook import ModuleHook
from lightning_pipesync.methods.method import PIECE_MB, group_members, parameters_of
from lightning_pipesync.methods.servers.cancellation import CancellablePasses
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.downpour import LocalSteps
from lightning_pipesync.methods.servers.elastic import ElasticReplica
from lightning_pipesync.methods.servers.learner import Learner
from lightning_pipesync.methods.servers.messages import Request, UpdateSettings, check_hyperparameters
from lightning_pipesync.methods.servers.policies import Gradient, Update
from lightning_pipesync.methods.servers.router import COORDINATOR, MessageRouter
from lightning_pipesync.methods.servers.server_side import ServerSide
from lightning_pipesync.methods.servers.shards import (
    SharedBucket,
    shared_buckets,
)
from lightning_pipesync.methods.sync_method import SyncMethod

T = TypeVar("T")

#: Timeouts that a learner waits if the others give up a rank that is lost: one may be lost after the other.
GIVING_UP = 3


class ParameterServer(SyncMethod):
    """SGD with parameter servers: learners push gradients at their own pace, and servers update the weights by them.

    The policy says when (lecture, "Synchronous SGD Variants", "Asynchronous SGD and Variants"). The servers are some of
    the ranks, or all, each with a share of the weights, beside their own training. They run the user's own optimizer on
    it, with the hyper-parameters that the learner with the newest gradient of an update had.

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
    in the midst of a pass if that is in a closure: ``sync.step(lambda: optimizer.step(closure))``. The closure is then
    evaluated again, with newer weights. Otherwise the gradient of a cancelled pass is lost. Within a long computation
    that is in no layer, call :meth:`cancel_if_late` now and then.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in
    :class:`ParameterServerConfig`.

    Attributes:
        only_serves: whether this rank takes no steps, with ``dedicated_servers=True``.
    """

    applies_grad = False  # the servers clip the mean
    name = "parameter_server"
    config_type = ParameterServerConfig
    shown_metrics = ("updates", "staleness", "mib_sent")
    shards_optimizer_state = True

    config: ParameterServerConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        transport, config = self.transport, self.config
        learners = config.learners(transport.world_size)
        self._policy = config.policy_for(len(learners))
        num_servers = config.num_servers(transport.world_size)
        self.only_serves, self._first_learner = transport.rank not in learners, learners[0]
        self._buckets = shared_buckets(parameters, num_servers, config)
        # Who is not heard of for the timeout is given up first, and what waits for that goes on. A rank that only
        # serves waits for as long as others train.
        moves = self._policy.local or self._policy.elastic
        self._survives_loss = config.survives_loss(transport.world_size)
        patience_s = config.timeout_s * (GIVING_UP if self._survives_loss else 1)
        self._learner = Learner(self._buckets, num_servers, transport, patience_s, moves, self.only_serves)
        self._passes = CancellablePasses(self._learner, self._policy.cancels, lambda: self.syncing, self._start_anew)
        self._messages = messages = MessageRouter(transport, config, self._learner)
        self.data.ask = messages.ask
        self._members = group_members(self.optimizers)
        self._clipping: dict[int, dict[str, float]] = {}  # of each optimizer's next step
        self._loaded = False
        self._hooks = [one.register_load_state_dict_post_hook(self._after_loading) for one in self.optimizers]
        arrived = ModuleHook(self._after_loading)
        self._hooks += [child.register_load_state_dict_post_hook(arrived) for child in self._module.modules()]
        self._hooks += self._passes.hook(self._module, parameters)
        self._serving = ServerSide(
            self._buckets, self.optimizers, self._policy, config, transport, messages, self._learner
        )
        self._local: LocalSteps | None = None
        if self._policy.local:
            ask, given = partial(messages.tell, Request.FETCH), (config.n_push, config.n_fetch)
            self._local = LocalSteps(self._learner, self._buckets, self.optimizers[0], *given, self._push, ask)
        self._elastic: ElasticReplica | None = None
        if self._policy.elastic:
            self._elastic = ElasticReplica(self._learner, self._buckets, config.period, self._push)

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
        """All updates so far, with ``keep_log=True``, on rank 0."""
        return self._serving.coordinator.log

    # --- a step -----------------------------------------------------------------------------------------------------

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Does nothing: the gradient is pushed as it is when the optimizer steps."""

    def _complete(self, index: int, loss_scale: float | None) -> bool:
        """Returns whether the step is skipped, with a loss scaler and where all ranks take it together."""
        if loss_scale is None or not self._policy.together:
            return False
        gradients = [p.grad for p in parameters_of(self.optimizers[index]) if p.grad is not None]
        return self._messages.skips(finite=all(bool(torch.isfinite(grad).all()) for grad in gradients))

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Pushes the gradient, and waits for the weights to go on from."""
        self._learner.check()
        if self.only_serves:
            raise RuntimeError(
                f"Rank {self.transport.rank} only serves (dedicated_servers=True), and takes no steps: leave them out "
                "if sync.only_serves, and call flush() with the others; or let partition='work_queue' give it no "
                "batches."
            )
        if self._members != group_members(self.optimizers):
            raise RuntimeError(
                "Parameters were added to an optimizer after parameter servers had begun to train: give it all of them "
                "from the beginning, frozen ones, too."
            )
        if self._loaded:
            self._settle()
        if self._elastic is not None:
            return self._step_of_replica(self._elastic, index, update)
        stepped, result = self.user_steps.update_by_method(index, update, evaluate=self._passes.evaluate)
        if stepped and self._local is not None:
            self._local.step()
        elif stepped:
            self._push_and_fetch(index)
        self._clipping.pop(index, None)
        self._passes.end_step()
        mark_stepped(self.optimizers[index])
        self.flushed = False
        return result

    def _step_of_replica(self, replica: ElasticReplica, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates this rank's own weights (EASGD)."""
        if self.flushed:
            replica.go_on_from_center()
        result = self.user_steps.update_own(index, update)
        replica.step()
        self.flushed = False
        return result

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Makes the servers clip the mean gradient of the next update by its L2 norm.

        With ``policy="downpour"`` or ``"easgd"`` the rank's own gradient is clipped.

        Returns:
            The norm of this rank's own gradient, 0-dim; no rank has the mean.
        """
        if self._policy.local or self._policy.elastic:
            return super().clip(max_norm, optimizer)
        self._clipping.setdefault(self._index(optimizer), {})["max_norm"] = max_norm
        gradients = [p.grad for p in self._trained(optimizer) if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def clip_value(self, max_value: float, optimizer: Optimizer | None = None) -> None:
        """Makes the servers clip every value of the mean gradient of the next update to ``[-max_value, max_value]``."""
        if self._policy.local or self._policy.elastic:
            super().clip_value(max_value, optimizer)
            return
        self._clipping.setdefault(self._index(optimizer), {})["max_value"] = max_value

    def _push_and_fetch(self, index: int) -> None:
        """Pushes an optimizer's gradient, unless it is known not to be used, and waits for weights."""
        gradient = self._learner.next_gradient(index)
        if self._passes.is_late:
            self._passes.num_cancelled += 1
            self._messages.tell(Request.FETCH)
        else:
            self._push(gradient, [bucket.pack() for bucket in self._buckets_of(index)])
        self._learner.await_weights()

    def _push(self, gradient: Gradient, present: list[list[bool]]) -> None:
        """Pushes what the buckets have packed."""
        index, buckets = gradient.optimizer, self._buckets_of(gradient.optimizer)
        settings = UpdateSettings(current(self.optimizers[index]), **self._clipping.get(index, {}))
        encoded = lambda server: [bucket.encoded(server) for bucket in buckets]  # noqa: E731
        self._messages.push(gradient, settings, encoded, present)

    def _start_anew(self) -> None:
        """Fetches newer weights, after a cancelled pass."""
        for bucket in self._buckets:
            bucket.clear_gradients()
        self._messages.tell(Request.FETCH)
        self._learner.await_weights()

    def cancel_if_late(self) -> None:
        """Ends a pass in a closure if there are newer weights, and if it can be repeated; called at each layer."""
        self._passes.cancel_if_late()

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def diverged(self) -> bool:
        return (self._policy.local or self._policy.elastic) and not self.flushed

    @property
    def in_lockstep(self) -> bool:
        return self._policy.together

    @property
    def trains_written_weights(self) -> bool:
        return False  # the servers have the weights

    @property
    def same_optimizer_states(self) -> bool:
        return self.config.policy != "easgd"

    def follow(self, module: nn.Module) -> None:
        """Makes ``module``, a running average of the weights that this rank gets, the first learner's at a flush.

        Other ranks get other weights, or at other steps, unless ``policy="sync"``.
        """
        read_buffers = buffer_reader(module)
        self._followed.append(lambda: [*module.parameters(), *read_buffers()])

    def flush(self) -> None:
        """Waits until all gradients are applied, and makes the weights the servers' newest; a collective call.

        Gradients that are too few for an update make one nevertheless. The buffers become those of the first learner.
        With ``policy="easgd"`` the rank's own weights come back with :meth:`resume`.
        """
        self._learner.check()
        if self._loaded:
            self._settle()
        if self._elastic is not None and not self.flushed:
            self._elastic.keep()
        buffers = self._shared_tensors()
        if self._survives_loss:
            self._retire_with(buffers)
        else:
            self._retire()
            exchange_fused(buffers, PIECE_MB, partial(self.transport.broadcast, src=self._first_learner))
        self.flushed = True

    def _retire(self) -> None:
        """Waits until all gradients are applied, and takes the weights that all ranks then have."""
        if self._local is not None:
            self._local.drain()
        self._messages.tell(Request.RETIRE)
        self._learner.await_weights()
        if self._local is not None:
            self._local.begin_anew()

    @torch.no_grad()
    def _retire_with(self, buffers: Sequence[Tensor]) -> None:
        """Retires, and makes the buffers the first learner's, without waiting for a rank that is lost."""
        if buffers and not self.only_serves:
            self._messages.tell_buffers([buffer.cpu().clone() for buffer in buffers])
        self._retire()
        for buffer, value in zip(buffers, self._messages.await_buffers() if buffers else (), strict=True):
            buffer.copy_(value)

    def resume(self) -> None:
        """Continues from the flushed weights, with ``policy="easgd"`` from this rank's own."""
        if self._elastic is not None and self.flushed:
            self._elastic.restore()
        self.flushed = False

    def _after_loading(self, *_: object) -> None:
        """Makes the next step start from the weights and the optimizer's state that were loaded."""
        self._loaded = True

    def _settle(self) -> None:
        """Gives the servers what was loaded on all ranks; a collective call.

        First they apply what was pushed before, which has no effect then.
        """
        self._loaded = False
        if self._local is not None:
            self._local.drop()
        self._messages.tell(Request.RETIRE)
        self._learner.drop_weights()
        self._serving.read_loaded()
        self._retire()  # a learner goes on once all servers have read
        if self._elastic is not None:
            self._elastic.after_loading()

    # --- state ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Returns the updates, this rank's cancelled passes, on rank 0 the mean staleness, and what the base does."""
        counts = {"updates": float(self._learner.version), "cancelled": float(self._passes.num_cancelled)}
        if self.transport.rank == COORDINATOR:
            counts["staleness"] = self._serving.coordinator.mean_staleness
        return {**counts, **super().metrics()}

    def optimizer_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Returns what ``optimizer.state_dict()`` would be without servers, on every rank.

        A collective call, unless the others go on without a rank that is lost: then it is what it was at the last
        :meth:`flush`.

        Raises:
            RuntimeError: a rank has trained since the last :meth:`flush`; or a server is lost.
        """
        index = self._index(optimizer)
        if self._loaded or self._policy.elastic:
            return self.optimizers[index].state_dict()
        return self._serving.optimizers.state_dict_of(index)

    def return_optimizer_states(self) -> None:
        """Sets the whole state of the optimizer, which :meth:`detach` would drop; as :meth:`optimizer_state_dict`."""
        if not self._loaded:
            self._serving.optimizers.restore_states()

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters and residuals of this rank, after :meth:`flush`."""
        state: dict[str, Any] = {"version": self._learner.version, "steps": self._learner.steps}
        residuals = [bucket.residual for bucket in self._buckets if bucket.residual is not None]
        if self._elastic is not None:
            state["replica"] = {**self._elastic.state_dict(), "optimizer": self.optimizers[0].state_dict()}
        return {**state, "coordinator": self._serving.coordinator.state_dict(), "residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank, after weights and optimizers were loaded.

        A collective call with ``policy="easgd"``.
        """
        self._learner.version = self._learner.newest = state["version"]
        self._learner.steps = state["steps"]
        self._messages.num_resumed += 1
        self._serving.load_state_dict(state["coordinator"], state["version"])
        for bucket, residual in zip(self._buckets, state["residuals"], strict=False):
            if bucket.residual is not None:
                bucket.residual.copy_(residual)
        if self._elastic is not None:
            self._elastic.load_state_dict(state["replica"])
            self.optimizers[0].load_state_dict(state["replica"]["optimizer"])
            self._settle()  # the next gradient is of the replica
        else:
            self._loaded = True

    def _detach(self, timeout_s: float) -> None:
        """Ends the threads and the process groups. The weights stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._serving.close(timeout_s)
        self._messages.close(timeout_s)
        super()._detach(timeout_s)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _buckets_of(self, index: int) -> list[SharedBucket]:
        """Returns the buckets of an optimizer."""
        return [bucket for bucket in self._buckets if bucket.group[0] == index]

    def _problem(self) -> ValueError | None:
        world_size = self.transport.world_size
        try:
            policy = self.config.policy_for(len(self.config.learners(world_size)))
            if (policy.local or policy.elastic) and len(self.optimizers) > 1:
                raise ValueError(
                    f"policy={self.config.policy!r} takes the steps of one optimizer, and there are "
                    f"{len(self.optimizers)}: choose another policy."
                )
            for optimizer in () if policy.elastic else self.optimizers:
                self.config.check_optimizer(optimizer, self.config.num_servers(world_size))
                check_hyperparameters(optimizer)
            self.config.survives_loss(world_size)
        except ValueError as error:
            return error
        return None
