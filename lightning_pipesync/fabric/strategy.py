"""Translates the hooks of Fabric's strategies into calls of a method."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.core.buckets import buffer_reader, unshare_storage
from lightning_pipesync.core.comm.exchange import broadcast_fused
from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.core.faults.failure import waits_for_all
from lightning_pipesync.core.rng import set_rng_states
from lightning_pipesync.data import TrainLoader
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.fabric.private import control_backward_sync, scaler_of, unwrapped
from lightning_pipesync.fabric.sharded import ShardedModelMixin
from lightning_pipesync.methods.method import PIECE_MB, Method, parameters_of
from lightning_pipesync.methods.settings import check_for_loop
from lightning_pipesync.methods.step import check_unscaling
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.clipping import Step, clip_norm, clip_value
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.session import MethodPlan, Sessions, contains
from lightning_pipesync.training.sharded_state import share_weights, state_of_shards, whole_state
from lightning_pipesync.training.state import CHECKPOINT_KEY, rank_state, section_of, state_of_rank


class BackwardSyncControl:
    """Implements ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: SyncedModule, enabled: bool = True) -> AbstractContextManager[None]:
        """Context manager in which backward passes accumulate gradients, if ``enabled``."""
        return module.no_sync() if enabled else nullcontext()


@waits_for_all("_watch", "all_reduce")
class PipeSyncFabricStrategyMixin(ShardedModelMixin):
    """Base of the strategies of all methods; precedes ``DDPStrategy`` in the bases.

    Checkpoints hold consolidated weights, whole optimizer states, and what each rank needs to resume bit for bit.

    Attributes:
        name: the name under which the strategy is registered.
        config: the method's settings.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        control_backward_sync(self, BackwardSyncControl())
        self._sessions = Sessions()

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        check_for_loop(type(self.config), settings)

    def method_of(self, optimizer: Optimizer | None = None) -> SyncMethod:
        """Returns the method that steps an optimizer, for example to read its metrics.

        Args:
            optimizer: an optimizer that was set up; may be omitted if only one model has optimizers, or if this rank
                still references only one such model.

        Raises:
            ValueError: there are several models and ``optimizer`` is None, or the optimizer was not set up.
        """
        if optimizer is not None:
            session = self._sessions.session_of(unwrapped(optimizer))
            if session is None:
                raise ValueError(f"{type(optimizer).__name__} was not set up: call fabric.setup(model, optimizer).")
            return session.method
        sessions = self._sessions.sessions
        if len(sessions) > 1:
            sessions = [held for held in sessions if any(map(self._sessions.is_held, held.modules))]
        if len(sessions) != 1:
            raise ValueError(
                f"{len(sessions)} models have optimizers: choose one with optimizer=. The next fabric.setup() ends the "
                "methods of models that no rank references any more; fabric.strategy.teardown() ends all."
            )
        return sessions[0].method

    def prepare_train_loader(self, loader: DataLoader[Any], optimizer: Optimizer | None = None) -> TrainLoader:
        """Replaces ``fabric.setup_dataloaders`` for the training data, after ``fabric.setup``.

        The batches follow the method's settings and are moved to the device. The seed of ``fabric.seed_everything``
        determines their order. A collective call.

        Args:
            loader: the user's loader, not set up by Fabric.
            optimizer: the optimizer that trains on the data; may be omitted as in :meth:`method_of`.

        Raises:
            ValueError: as in :meth:`SyncMethod.prepare_train_loader` and :meth:`method_of`.
        """
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        method = self.method_of(optimizer)
        data, trained, sessions = method.data, method.optimizers[0], weakref.ref(self._sessions)

        def find_data() -> TrainingData:  # loading a checkpoint, or adding an optimizer, replaces the method
            present = sessions()
            session = None if present is None else present.session_of(trained)
            return data if session is None else session.method.data

        data.find = find_data
        return method.prepare_train_loader(loader, seed, self.batch_to_device)

    # --- set-up and end ---------------------------------------------------------------------------------------------

    @override
    def setup_module(self, module: nn.Module) -> SyncedModule:  # type: ignore[override]
        """Broadcasts the weights and buffers of rank 0, or of the first replica; optimizers may be set up later."""
        wrapper = self._begin(module, [])
        if is_sharded(wrapper.module):
            share_weights(wrapper.module, self._replicas_of(wrapper.module))
            return wrapper
        broadcast_fused([*wrapper.parameters(), *buffer_reader(wrapper)()], PIECE_MB)
        return wrapper

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Adds ``optimizer`` to the method of the models that have its parameters."""
        self._add(optimizer)
        self._sessions.attach(self._plan)
        if self._sessions.session_of(optimizer) is None:
            raise ValueError(
                f"No model that was set up has parameters of {type(optimizer).__name__}: call "
                "fabric.setup_module(model) first."
            )
        return optimizer

    @override
    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any) -> Any:
        """Attaches the method to the model and its optimizers; a scheduler is returned unchanged."""
        wrapper = self._begin(module, optimizers)
        for optimizer in optimizers:
            self._add(optimizer)
        self._sessions.attach(self._plan)
        return (wrapper, optimizers, *scheduler)

    @override
    def teardown(self) -> None:
        """Detaches the methods from all models; also called at interpreter shutdown."""
        self._sessions.end()
        super().teardown()

    # --- a training step --------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        method = self.method_of(optimizer)
        if kwargs.get("closure") is None:  # otherwise the method reduces what the closure computes
            method.reduce(optimizer, self._scaler)
        return method.step(partial(super().optimizer_step, optimizer, **kwargs), optimizer)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips the gradient that is about to be applied; returns its norm before clipping."""
        step = self._step_to_clip(optimizer)
        return clip_norm([step], parameters_of(optimizer), max_norm, norm_type, error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clips every value of the gradient that is about to be applied."""
        clip_value([self._step_to_clip(optimizer)], parameters_of(optimizer), clip_val)

    def _step_to_clip(self, optimizer: Optimizer) -> Step:
        method = self.method_of(optimizer)
        method.reduce(optimizer, self._scaler)
        return method, optimizer

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Context manager in which weights and buffers are the method's consolidated ones, the same on all ranks.

        Use it for validation and wherever else the weights are read outside of a training step. ``fabric.save``
        consolidates them itself. A collective call: all ranks enter it.

        Raises:
            RuntimeError: a peer is lost.
        """
        training = self._sessions.flush()
        try:
            yield
        finally:
            for method in training:
                method.resume()

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole optimizer state, as under DDP, on every rank; a collective call."""
        session = self._sessions.session_of(optimizer)
        if session is None:
            return super().get_optimizer_state(optimizer)
        return whole_state(optimizer, session.method.optimizer_state_dict(optimizer))

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the state of a model; of a sharded one the whole state, on rank 0, in a collective call."""
        model = module.module if isinstance(module, SyncedModule) else module
        state = whole_state(model, super().get_module_state_dict(model))
        return state if model is module else unshare_storage(state)

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        model = module.module if isinstance(module, SyncedModule) else module
        super().load_module_state_dict(model, state_of_shards(model, state_dict), strict)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Saves consolidated weights, and each rank's state if a model and all its optimizers are in ``state``."""
        if CHECKPOINT_KEY in state:
            raise ValueError(f"The key {CHECKPOINT_KEY!r} of a checkpoint is reserved: use another one in the state.")
        with self.consolidated():
            if methods := self._methods_in(state):
                transport = next(iter(methods.values())).transport
                section = section_of(self.name, self.config, transport, lambda: self._rank_state_dict(methods))
                state = {**state, CHECKPOINT_KEY: section}
            super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads weights and optimizers; resumes bit for bit if the checkpoint holds this rank's state."""
        objects: Mapping[str, Any] = state if isinstance(state, Mapping) else {"": state}
        loaded = [value for value in objects.values() if isinstance(value, SyncedModule)]
        for wrapper in loaded:
            if (session := self._sessions.session_of(wrapper)) is not None:
                # Gradients in flight and state of the ranks belong to the weights that are replaced.
                self._sessions.suspend(session)
        try:
            with ExitStack() as stack:
                for value in objects.values():
                    if isinstance(value, Optimizer):
                        stack.callback(value.register_load_state_dict_pre_hook(state_of_shards).remove)
                remainder = super().load_checkpoint(path, state, *args, **kwargs)
        finally:
            self._sessions.attach(self._plan)
        if loaded:
            self._load_from(remainder.pop(CHECKPOINT_KEY, None), objects)
        return remainder

    def _load_from(self, saved: dict[str, Any] | None, objects: Mapping[str, Any]) -> None:
        """Resumes the methods of the models in ``objects`` from what a checkpoint holds besides a plain one's."""
        methods = list(self._methods_in(objects).values())
        if not methods:
            return
        state = state_of_rank(saved, self.name, methods[0].transport, self.config)
        if state is None:
            return
        states = state.get("methods", {})
        for name, method in self._methods_in(objects, states).items():
            if name in states:
                method.load_state_dict(states[name])
        if "precision" in state:
            self.precision.load_state_dict(state["precision"])
        set_rng_states(state["rng"], self.root_device)

    def _rank_state_dict(self, methods: Mapping[str, SyncMethod]) -> dict[str, Any]:
        states = {name: method.state_dict() for name, method in methods.items()}
        return rank_state({"methods": states}, self.precision.state_dict(), self.root_device)

    def _methods_in(self, state: Mapping[str, Any], saved: Mapping[str, Any] | None = None) -> dict[str, SyncMethod]:
        """Returns the methods of the models in ``state`` whose optimizers are all in it, too, by a model's name.

        Of several models of a method, it is the first name, or the name that ``saved`` has.
        """
        optimizers = {id(value) for value in state.values() if isinstance(value, Optimizer)}
        names: dict[int, list[str]] = {}
        for name, value in state.items():
            session = self._sessions.session_of(value) if isinstance(value, SyncedModule) else None
            if session is not None and {id(optimizer) for optimizer in session.optimizers} <= optimizers:
                names.setdefault(id(session), []).append(name)
        chosen = {key: next((n for n in known if n in (saved or {})), known[0]) for key, known in names.items()}
        return {chosen[id(session)]: session.method for session in self._sessions.sessions if id(session) in chosen}

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return scaler_of(self.precision)

    @property
    def _plan(self) -> MethodPlan:
        backend = "gloo" if self.process_group_backend == "gloo" else None  # otherwise the transport chooses
        return MethodPlan(
            self.name,
            self.config,
            self.num_processes,
            backend,
            replicas_of=self._replicas_of,
            num_readers=self._place_of_data[1],
        )

    def _begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> SyncedModule:
        self._sessions.end_at_shutdown()  # Fabric does not tell a strategy of the end
        self._release(module)
        return self._sessions.wrap(self._parallelized(module, optimizers), automatic=False)

    def _release(self, module: nn.Module) -> None:
        """Ends the methods of models that no rank references any more, and of ``module``; a collective call.

        While one rank references a model, all take part in its collective calls.
        """
        sessions = self._sessions
        if not sessions.modules:
            return
        gc.collect()
        held = [sessions.is_held(known) and known is not module for known in sessions.modules]
        held_somewhere = torch.tensor(held, dtype=torch.uint8, device=self.root_device)
        dist.all_reduce(held_somewhere, dist.ReduceOp.MAX)
        kept = [known for known, keep in zip(sessions.modules, held_somewhere.tolist(), strict=True) if keep]
        for session in sessions.sessions.copy():
            again = contains(session.modules, module)
            if again or not any(contains(kept, trained) for trained in session.modules):
                sessions.remove(session, write_back=again)  # the training of ``module`` continues
        sessions.modules = kept

    def _add(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            check_unscaling(optimizer, "precision='16-mixed'", f"strategy={self.name!r}")
        self._sessions.add_optimizer(optimizer)


class RefusedPipelineMixin:
    """Pipelines cannot be strategies of Fabric."""

    name: str

    def __init__(self, **_: Any) -> None:
        raise ValueError(
            f"strategy={self.name!r} cannot run under Fabric, whose loop makes the backward pass of one mini-batch at "
            "a time; a pipeline has several in flight. Use Fabric(strategy='ddp') and, after launch(), "
            f"lightning_pipesync.{METHODS[self.name].__name__}(layers, loss, optimizer_factory) with "
            f"train_batch(batch) in the loop instead of fabric.setup(); or Trainer(strategy={self.name!r})."
        )


def mixin_of(method: type[Method]) -> tuple[type, Collection[str]]:
    """Returns the mixin of a method's strategy, and the settings that only the Trainer can follow."""
    return RefusedPipelineMixin if method.makes_passes else PipeSyncFabricStrategyMixin, method.config_type.for_trainer
