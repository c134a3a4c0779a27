"""The Accelerator of transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_pipesync.accelerate.accelerator import PipeSyncAccelerator
from lightning_pipesync.accelerate.sharding import shards_by_fsdp2
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.session import contains
from lightning_pipesync.transformers.loader import StepsLoader


class TrainersAccelerator(PipeSyncAccelerator):
    """A PipeSyncAccelerator that returns a model that it shards without a wrapper: it becomes ``trainer.model``.

    Evaluation mode does not consolidate its weights, which the Trainer does itself.
    """

    elastic_loader_type = StepsLoader
    warns_of_own_weights = False  # with label smoothing the Trainer unwraps its model in each step, to read its class

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unwrapped: list[SyncedModule] = []  # which their sessions do not keep

    def _wrapped(self, model: nn.Module) -> nn.Module:
        wrapper = super()._wrapped(model)
        if not isinstance(wrapper, SyncedModule) or not shards_by_fsdp2(self):
            return wrapper
        if not contains(self._unwrapped, wrapper):
            self._unwrapped.append(wrapper)

            def resume(*_: Any) -> None:
                if wrapper.method is not None and wrapper.module.training and torch.is_grad_enabled():
                    wrapper.begin_to_train()

            wrapper.module.register_forward_pre_hook(resume, prepend=True)  # before FSDP2 gathers the weights
        return wrapper.module
