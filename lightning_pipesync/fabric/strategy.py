"""Fabric's checkpoints, with what a method needs besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.rng import rng_states, set_rng_states
from lightning_pipesync.fabric.module import SyncedModule, TrainedModule
from lightning_pipesync.fabric.training import FabricTrainingMixin
from lightning_pipesync.methods.checkpoint import CHECKPOINT_KEY, state_of_rank
from lightning_pipesync.methods.method import SyncMethod


class PipeSyncFabricStrategyMixin(FabricTrainingMixin):
    """What the strategies of all methods have in common; goes before ``DDPStrategy`` in the bases.

    Attributes:
        checkpoint_replicas: whether checkpoints hold each rank's own state.
    """

    checkpoint_replicas = True

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state, as DDP's optimizer would have it, on every rank; a collective call."""
        synced = self.owner_of(optimizer)
        if synced is None:
            return super().get_optimizer_state(optimizer)
        return synced.attached().optimizer_state_dict(optimizer)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(module.module if isinstance(module, SyncedModule) else module)

    @override
    def load_module_state_dict(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().load_module_state_dict(module.module if isinstance(module, SyncedModule) else module, *args, **kwargs)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Saves consolidated weights, and what each rank needs to go on if model and optimizers are in ``state``.

        Raises:
            ValueError: ``state`` has something of its own under the key of the latter.
        """
        if CHECKPOINT_KEY in state:
            raise ValueError(f"The key {CHECKPOINT_KEY!r} of a checkpoint is taken: give it another name in the state.")
        with self.consolidated():
            methods = {name: synced.attached() for name, synced in _trained_in(state).items()}
            if methods:
                saved: dict[str, Any] = {"strategy": self.name, "world_size": self.world_size}
                if self.checkpoint_replicas:
                    states = next(iter(methods.values())).transport.collect_states(self._rank_state_dict(methods))
                    saved["ranks"] = dict(enumerate(states or []))
                state = {**state, CHECKPOINT_KEY: saved}
            super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads weights and optimizers, and begins anew from them, or goes on where the checkpoint was saved.

        Raises:
            ValueError: the checkpoint was written by this strategy with another number of ranks.
        """
        objects: Mapping[str, Any] = state if isinstance(state, Mapping) else {"": state}
        loaded = [synced.trained for synced in objects.values() if isinstance(synced, SyncedModule)]
        for synced in loaded:
            if synced.method is not None:
                # What is in flight, and what ranks have of their own, is of the weights that go.
                synced.method.flush()
                synced.method.return_optimizer_states()
                synced.detach()
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        for synced in loaded:
            if synced.optimizers:
                synced.attached()
        if loaded and (saved := remainder.pop(CHECKPOINT_KEY, None)) is not None:
            methods = {name: synced.attached() for name, synced in _trained_in(objects).items()}
            if methods:
                self._load_from(saved, methods)
        return remainder

    def _load_from(self, saved: dict[str, Any], methods: Mapping[str, SyncMethod]) -> None:
        """Has ``methods`` go on from what a checkpoint holds besides a plain one's content."""
        state = state_of_rank(saved, self.name, self.global_rank, self.world_size, self.config)
        if state is None:
            return
        for name, method in methods.items():
            if name in state.get("methods", {}):
                method.load_state_dict(state["methods"][name])
        if "precision" in state:
            self.precision.load_state_dict(state["precision"])
        set_rng_states(state["rng"])

    def _rank_state_dict(self, methods: Mapping[str, SyncMethod]) -> dict[str, Any]:
        """Returns what this rank needs to go on bit for bit, besides what a plain checkpoint holds."""
        state: dict[str, Any] = {"methods": {name: method.state_dict() for name, method in methods.items()}}
        if precision := self.precision.state_dict():  # a loss scale of its own
            state["precision"] = precision
        return {**state, "rng": rng_states(self.root_device)}


def _trained_in(state: Mapping[str, Any]) -> dict[str, TrainedModule]:
    """Returns the models in ``state`` that have optimizers, which are all in it, too."""
    optimizers = {id(value) for value in state.values() if isinstance(value, Optimizer)}
    return {
        name: value.trained
        for name, value in state.items()
        if isinstance(value, SyncedModule)
        and value.trained.optimizers
        and {id(o) for o in value.trained.optimizers} <= optimizers
    }
