"""Base class of the methods that synchronize what a training loop computes: how they are attached to it."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.buckets import buffer_reader
from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import (
    check_copies,
    check_same,
    check_same_values,
    collect_consistent_parameters,
    describe_optimizers,
    on_all_ranks,
)
from lightning_pipesync.core.dtensors import (
    LocalShard,
    ShardedOptimizers,
    check_optimizers_of_shards,
    is_sharded,
    local_of,
    reduce_gradient,
)
from lightning_pipesync.core.faults.shutdown import AFTER_ERROR_S
from lightning_pipesync.core.held_weights import DifferentWeightsError, HeldWeights, check_held
from lightning_pipesync.core.parameters import NamedParameter, device_of, hook_gradient
from lightning_pipesync.core.sharding import groups_of_shards, readers_of_model, replicas_of_model
from lightning_pipesync.core.torch_private import is_dtensor, reshard, within_collectives
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.method import PIECE_MB, group_members, network_metrics, parameters_of
from lightning_pipesync.methods.module_hook import hook_loading, modules_with
from lightning_pipesync.methods.settings import check_launch, config_from, warn_of_one_rank
from lightning_pipesync.methods.step import StepRecord, UserSteps
from lightning_pipesync.methods.step_calls import StepCalls

#: What to do where hyper-parameters differ.
SAME_RATES = (
    "Schedulers must do the same on all ranks: log the metric that one follows with sync_dist=True, or average it over "
    "the ranks."
)


class SyncMethod(StepCalls):
    """Takes over gradient synchronization and the optimizer step of one module on every rank.

    The constructor attaches the method: it broadcasts rank 0's weights and buffers. A plain loop calls :meth:`step` in
    place of ``optimizer.step()``. With several optimizers, each call names its optimizer. The calls of a step follow
    the order of :class:`Stage`; a repeated call in the same step does nothing. With a loss scaler::

        scaler.scale(loss).backward()
        sync.reduce(scaler=scaler)                  # in place of scaler.unscale_(optimizer)
        sync.clip(1.0)
        sync.step(lambda: scaler.step(optimizer))   # all ranks skip the step, or none
        scaler.update()

    Args:
        module: the model, the same on all ranks.
        optimizer: one or several torch optimizers over its parameters.
        config: the settings; alternatively, pass them as keywords.
        backend: backend of the method's communication, see :class:`Transport`.
        replicas: the dimension of a device mesh along which the model is replicated, such as ``mesh["replicas"]``,
            where ``fully_shard`` has sharded it along another; None: as the mesh of its parameters says, the one
            dimension along which they are not sharded. Every rank has a replica of a model that is not sharded.

    Attributes:
        config: the settings.
        same_weights: whether all ranks have the same weights and optimizer states at every step. What is loaded into
            them is then compared at the first step and at each :meth:`flush`, and refused if it differs.
        weights_differ: whether a flush has found that ranks hold different weights, and raised.
        updates_by_own_steps: whether the user's optimizers update the weights, each by its own step on all of them.

    Raises:
        ValueError: the ranks differ in settings, model, optimizers or their states, or the method does not support the
            model or an optimizer.
        RuntimeError: ``torch.distributed`` is not initialized.
    """

    same_weights: ClassVar[bool] = False
    updates_by_own_steps: ClassVar[bool] = False
    weights_differ = False

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
        self.config = config_from(self.config_type, config, settings)
        check_launch(type(self).__name__, self.config)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.flushed = False
        reshard(module)
        self._module, self._mesh = module, replicas or replicas_of_model(module)
        self.record = StepRecord(len(self.optimizers), self.reduces_together)
        self._hooked: set[int] = set()  # ids of the parameters whose gradients are
        self._was_loaded = False  # whether a state was, since the ranks have compared
        self._followed: list[Callable[[], list[Tensor]]] = []
        self._ends: list[Callable[[float], object]] = []
        self.transport = self._make_transport(device_of(module), backend)
        self._at_detach(self.transport.close)
        try:
            self.user_steps = UserSteps(self)
            self._at_detach(lambda _: self.user_steps.release())
            self.transport.end_other_waits(groups_of_shards(module))
            watch = self.transport.watch
            watched = within_collectives(module, partial(watch.waiting, "the ranks of its replica, within FSDP2"))
            self._at_detach(lambda _: watched.close())
            self._sharded = ShardedOptimizers(self.optimizers) if is_sharded(module) else None
            if self._sharded is not None:
                release = self._sharded.release
                self._at_detach(lambda _: release())
            parameters = on_all_ranks(self.transport.job, self._agreed_parameters)
            on_all_ranks(self.transport.job, self._check_support)
            named = [(parameter.name, parameter.tensor) for parameter in parameters]
            if self.same_optimizer_states:
                check = partial(check_same_values, self.transport, named, self.optimizers, weights=False)
                on_all_ranks(self.transport.job, check)
            if self.config.num_jobs is None:
                warn_of_one_rank(type(self).__name__, self.transport.world_size)
            _warn_of_sync_batch_norm(type(self).__name__, module, self.transport)
            with self.transport.traffic.beside_steps():
                exchange_fused([parameter.tensor for parameter in parameters], PIECE_MB, self.transport.broadcast)
                check_copies(self.transport, named)
            self._read_buffers = buffer_reader(module)
            self._broadcast_buffers()
            self.data = TrainingData(self.config, self.transport)
            if self.same_weights:
                trained = [parameter for one in self.optimizers for parameter in parameters_of(one)]
                hooks = hook_loading(self._note_loading, modules_with(module, trained), self.optimizers)
                self._remove_at_detach(hooks)
            self._attach(parameters)
        except BaseException:
            self._detach(timeout_s=1.0)
            raise

    # --- replicas that come and go ----------------------------------------------------------------------------------

    def join(self) -> None:
        """Joins the other replicas, if they are jobs of their own; before the first forward pass."""

    def hand_over(self, **parts: Any) -> None:
        """Adds ``parts`` to what a replica that joins gets from another one, by ``state_dict`` and its counterpart."""

    def leave(self) -> None:
        """Asks this replica to leave, if the replicas are jobs of their own; may be called by a signal's handler."""

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def same_optimizer_states(self) -> bool:
        """Whether all ranks begin with the same optimizer states, so that different ones are refused."""
        return True

    def synchronize(self) -> None:
        """Waits for the last step's update of this rank's weights; not a collective call."""

    def settle(self) -> None:
        """Waits until nothing that this rank communicates is in flight; not a collective call."""
        self.synchronize()
        if self.transport.background is not None:
            self.transport.background.wait_all()

    def give_up(self, timeout_s: float = AFTER_ERROR_S) -> str:
        """Ends what is under way, so that this rank's weights can be read after an error; not a collective call.

        Returns what they are, in words that follow "its weights are". Nothing else but :meth:`detach` is called after
        it.

        Args:
            timeout_s: maximum seconds to wait for what is in flight.
        """
        return f"those of rank {dist.get_rank()}"

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Within it the parameters hold the weights after the last update; not a collective call."""
        self.synchronize()
        yield

    @abstractmethod
    def resume(self) -> None:
        """Undoes :meth:`flush`, but keeps changes to the weights since then; does nothing if not flushed.

        Not a collective call.
        """

    def follow(self, module: nn.Module) -> None:
        """Makes :meth:`flush` also consolidate ``module``, a running average of this rank's weights.

        Its buffers become rank 0's. Its parameters are the same on all ranks if the weights are.
        """
        self._followed.append(buffer_reader(module))

    # --- state ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Returns MiB sent, seconds of exposed communication, and the method's further metrics, by name."""
        return network_metrics(self.transport.traffic)

    @property
    def ddp_bytes(self) -> float | None:
        """Each rank's share of an all-reduce of the gradients; None with several optimizers, whose steps differ."""
        if len(self.optimizers) > 1:
            return None
        gradients = sum(parameter.nbytes for parameter in self._trained(None) if parameter.requires_grad)
        return 2 * (self.transport.world_size - 1) / self.transport.world_size * gradients

    def optimizer_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Returns the whole optimizer state, as ``optimizer.state_dict()`` without the method; a collective call.

        Of a sharded model it has DTensors. The optimizer may be omitted if there is only one.
        """
        with self.given_back():
            return self.optimizers[self._index(optimizer)].state_dict()

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Context in which the optimizers have the model's own parameters, DTensors if it is sharded, and their states.

        Within it save them, as with ``torch.distributed.checkpoint``; a collective call.
        """
        with ExitStack() as until_taken:
            if self._sharded is not None:
                until_taken.enter_context(self._sharded.given_back())
            # get_state_dict makes a state that is missing by a step of zeros.
            until_taken.enter_context(self.user_steps.allowing(*self.optimizers))
            yield

    def _at_detach(self, end: Callable[[float], object]) -> None:
        """Adds what ends a part of the method, called by :meth:`detach`, or if attaching fails; the last one first.

        ``end`` gets the maximum seconds to wait.
        """
        self._ends.append(end)

    def _remove_at_detach(self, hooks: Iterable[RemovableHandle]) -> None:
        for hook in hooks:
            self._at_detach(lambda _, hook=hook: hook.remove())  # type: ignore[misc]

    def _detach(self, timeout_s: float) -> None:
        with ExitStack() as ends:
            for end in self._ends:
                ends.callback(end, timeout_s)
            self._ends.clear()

    # --- what a method implements -----------------------------------------------------------------------------------

    @abstractmethod
    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        """Prepares the module and the optimizers for the method; called once, on all ranks.

        What it starts or registers it hands to :meth:`_at_detach` at once.
        """

    def _check_support(self) -> None:
        """Raises a ValueError if the settings do not support the optimizers, or replicas of several ranks."""
        if self.transport.shards is None:
            return
        if self.config.injection is not None:
            raise ValueError(
                f"injection={self.config.injection!r} sends rows to all ranks, and a replica has "
                f"{self.transport.ranks_per_replica}: set injection=None with replicas=."
            )
        if self.config.low_rank is not None:
            raise ValueError(
                f"low_rank={self.config.low_rank!r} factorizes whole matrices, and a replica of "
                f"{self.transport.ranks_per_replica} ranks has divided them: set low_rank=None with replicas=."
            )
        elementwise = getattr(self.config, "elementwise", ())
        check_optimizers_of_shards(self.optimizers, elementwise, self.updates_by_own_steps)

    def _make_transport(self, device: torch.device, backend: str | None) -> Transport:
        settings = {"replicas": self._mesh, "readers": readers_of_model(self._module), **self._transport_settings()}
        return Transport(device, timeout_s=self.config.timeout_s, backend=backend, **settings)

    def _transport_settings(self) -> dict[str, Any]:
        """Returns further arguments of the method's :class:`Transport`."""
        return self.config.arrangement

    def _agreed_parameters(self) -> list[NamedParameter]:
        """Checks that all ranks have the same parameters, hooks their gradients and returns them; a collective call."""
        parameters = collect_consistent_parameters(self.transport, self.config, self._module, self.optimizers)
        for parameter in parameters:
            tensor = parameter.tensor
            if parameter.group and id(tensor) not in self._hooked:
                self._hooked.add(id(tensor))
                hooks = [self.record.gradient_hook(parameter.group[0])]
                if isinstance(tensor, LocalShard) and not tensor.reduced_by_fsdp:
                    hooks.insert(0, reduce_gradient)
                self._remove_at_detach(hook_gradient(tensor, hook) for hook in hooks)
        self._agreed, self._agreed_members = parameters, group_members(self.optimizers)
        return parameters

    def _name_of(self, parameter: Tensor) -> str:
        return next(known.name for known in self._agreed if known.tensor is parameter)

    @property
    def _has_new_parameters(self) -> bool:
        """Whether an optimizer has other parameters than the ranks agreed on: a callback has unfrozen layers, say."""
        return self._agreed_members != group_members(self.optimizers)

    def _begin(self) -> None:
        known = {id(parameter.tensor) for parameter in self._agreed}
        for name, parameter in self._module.named_parameters():
            if is_dtensor(parameter) and id(local_of(parameter)) not in known:
                raise ValueError(
                    f"Parameter {name} was sharded (DTensor) after {type(self).__name__} was attached, which does not "
                    "train it: call fully_shard and parallelize_module first, then make the optimizer, and attach last."
                )
        self._compare_loaded()

    def _note_loading(self, loaded: nn.Module | Optimizer, *_: object) -> None:
        """Called after a state was loaded into a part that is trained, or an optimizer, if ``same_weights``.

        A part that no optimizer trains does not count: weights may be loaded into a teacher often.
        """
        self._was_loaded = True

    def _compare_loaded(self) -> None:
        """Raises on all ranks if some rank has loaded a state and ranks now differ; a collective call."""
        if not self.same_weights:
            return
        noted, self._was_loaded = self._was_loaded, False
        with self.transport.traffic.beside_steps():
            loaded = any(self.transport.exchange_flags(noted).wait())
            if self.transport.shards is not None:
                loaded = any(self.transport.shards.exchange_flags(loaded).wait())
        if loaded:
            with self.true_weights():
                named = [(name, local_of(parameter)) for name, parameter in self._module.named_parameters()]
                check_same_values(self.transport, named, self.optimizers, weights=True)
                check_copies(self.transport, named)

    def _compare_weights(self) -> None:
        """Compares the consolidated weights over the ranks, see [Note: a bit that changed]; a collective call.

        Raises:
            RuntimeError: on every rank: ranks that must hold the same weights do not.
            ValueError: on every rank: they should, and have other hyper-parameters, such as a learning rate.
        """
        transport, shards = self.transport, self.transport.shards
        if self.same_weights:
            _, hyperparameters = describe_optimizers(self.optimizers)
            try:
                check_same(transport.job, hyperparameters, SAME_RATES)
            except ValueError:
                self.weights_differ = True
                raise
        named = [(parameter.name, parameter.tensor) for parameter in self._agreed]
        part = 0 if shards is None else shards.rank
        held = HeldWeights.of_this_process(transport.job.rank, named, part)
        try:
            with transport.traffic.beside_steps():
                check_held(transport.job, held, among=transport, beside=shards)
        except DifferentWeightsError:
            self.weights_differ = True
            raise

    def _broadcast_buffers(self) -> None:
        """Makes the buffers of all ranks rank 0's: also of those that hold a replica together, each with its own."""
        shards, shared = self.transport.shards, self._shared_tensors()
        with self.transport.traffic.beside_steps():
            if shards is None or shards.rank == 0:
                exchange_fused(shared, PIECE_MB, self.transport.broadcast)
            if shards is not None:
                exchange_fused(shared, PIECE_MB, shards.broadcast)

    def _shared_tensors(self) -> list[Tensor]:
        """Returns the buffers, and what :meth:`flush` makes one rank's of the modules that :meth:`follow` was given."""
        return [*self._read_buffers(), *(tensor for read in self._followed for tensor in read())]


def _warn_of_sync_batch_norm(method: str, module: nn.Module, transport: Transport) -> None:
    """Warns on rank 0 if ``module`` has ``SyncBatchNorm`` and ``method`` communicates over NCCL.

    NCCL's kernels wait for their peers. So operations of two groups must be issued in the same order on all ranks
    (NCCL's user guide, "Using multiple NCCL communicators concurrently"), and those of two threads are not.
    """
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if not names or transport.rank or transport.world_size == 1 or transport.backend != "nccl":
        return
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    warnings.warn(
        f"{method} communicates over NCCL while the forward and backward passes run, in which SyncBatchNorm ({listed}) "
        "communicates, too. Ranks that issue the two in different orders wait for each other for ever. Use BatchNorm, "
        "or Gloo: backend='gloo', in strategies process_group_backend='gloo'.",
        stacklevel=3,
    )
