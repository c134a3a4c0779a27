"""Checkpoints of Fabric, with what the methods need besides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.buckets import unshare_storage
from lightning_pipesync.core.rng import set_rng_states
from lightning_pipesync.fabric.job import JobMixin
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.session import MethodPlan, Sessions
from lightning_pipesync.training.sharded_state import state_of_shards, whole_state
from lightning_pipesync.training.state import CHECKPOINT_KEY, rank_state, section_of, state_of_rank

if TYPE_CHECKING:  # the mixin serves `lightning` and its twin distribution `lightning_fabric`, whose classes differ
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class FabricCheckpointMixin(JobMixin, _Base):
    """Saves consolidated weights and whole optimizer states, and what each rank needs to resume bit for bit."""

    _sessions: Sessions

    @property
    @abstractmethod
    def _plan(self) -> MethodPlan: ...

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
        module, synced = _unwrapped_module(module)
        state = whole_state(module, super().get_module_state_dict(module))
        return unshare_storage(state) if synced else state

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        module, _ = _unwrapped_module(module)
        super().load_module_state_dict(module, state_of_shards(module, state_dict), strict)

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
            with cut_states(value for value in objects.values() if isinstance(value, Optimizer)):
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


def _unwrapped_module(module: nn.Module) -> tuple[nn.Module, bool]:
    """Returns the user's model, and whether it was wrapped in a :class:`SyncedModule`."""
    return (module.module, True) if isinstance(module, SyncedModule) else (module, False)


@contextmanager
def cut_states(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Context in which those of ``optimizers`` that are sharded load whole states, each rank its shards."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.register_load_state_dict_pre_hook(state_of_shards).remove)
        yield
