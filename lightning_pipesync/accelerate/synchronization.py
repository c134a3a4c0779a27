"""Which method looks after which of the models and optimizers that were prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pipesync.accelerate.launched import ranks_of_host
from lightning_pipesync.accelerate.model import SynchronizedModel
from lightning_pipesync.accelerate.optimizer import SynchronizedOptimizer
from lightning_pipesync.methods.dear import DeARConfig
from lightning_pipesync.methods.method import SyncMethod, parameters_of
from lightning_pipesync.methods.registry import SYNC_METHODS, MethodConfig
from lightning_pipesync.methods.selsync import SelSync


@dataclass(frozen=True)
class Synchronization:
    """A method, the optimizers whose steps it takes, and the models that they train.

    Attributes:
        models: all that share an optimizer.
        optimizers: all that share a model.
        method: attached to them.
    """

    models: list[SynchronizedModel]
    optimizers: list[SynchronizedOptimizer]
    method: SyncMethod

    @classmethod
    def attach(
        cls,
        models: list[SynchronizedModel],
        optimizers: list[SynchronizedOptimizer],
        config: MethodConfig,
        *,
        backend: str | None,
    ) -> Synchronization:
        """Attaches a method; a collective call. All ranks then have rank 0's weights.

        Args:
            models: what the optimizers train.
            optimizers: over their parameters.
            config: the settings.
            backend: of the traffic, see Transport.

        Raises:
            ValueError: the ranks differ in settings or model, or something cannot be trained so.
        """
        if isinstance(config, DeARConfig):
            config = config.on_hosts_of(ranks_of_host(), torch.distributed.get_world_size())
        modules = [model.module for model in models]
        root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        make: Any = SYNC_METHODS[type(config)]
        method: SyncMethod = make(root, [one.optimizer for one in optimizers], config, backend=backend)
        for model in models:
            model.method = method
        for optimizer in optimizers:
            optimizer.method = method
        if isinstance(method, SelSync):
            method.data.followed = True  # by prepare_train_loader, and backward sees to it that it was called
        return cls(models, optimizers, method)

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank needs, besides the consolidated weights and the optimizer's state."""
        return self.method.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank.

        Raises:
            ValueError: it is of other settings.
        """
        self.method.load_state_dict(state)

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the method's threads and process groups; the weights stay as they are."""
        for model in self.models:
            model.method = None
        for optimizer in self.optimizers:
            optimizer.method = None
        self.method.detach(timeout_s)


def connected(
    models: Sequence[SynchronizedModel], optimizers: Sequence[SynchronizedOptimizer]
) -> list[tuple[list[SynchronizedModel], list[SynchronizedOptimizer]]]:
    """Returns groups of models and optimizers, so that what shares a parameter is in one group.

    Models that no optimizer trains, and optimizers that train none of the models, are left out.
    """
    groups: list[tuple[list[SynchronizedModel], list[SynchronizedOptimizer]]] = []
    for optimizer in optimizers:
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        own = [model for model in models if any(id(parameter) in trained for parameter in model.module.parameters())]
        if not own:
            continue
        sharing = [group for group in groups if any(model in own for model in group[0])]
        merged = [model for model in models if model in own or any(model in group[0] for group in sharing)]
        others = [one for group in sharing for one in group[1]]
        groups = [group for group in groups if group not in sharing] + [(merged, [*others, optimizer])]
    return groups
