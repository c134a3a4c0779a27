"""The Accelerator of transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from lightning_pipesync.accelerate.accelerator import PipeSyncAccelerator
from lightning_pipesync.accelerate.sharding import shards_by_fsdp2
from lightning_pipesync.training.module import SyncedModule
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

    @override
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        prepared = super().prepare(*args, device_placement=device_placement)
        if not shards_by_fsdp2(self):
            return prepared
        if not isinstance(prepared, tuple):
            return self._without_wrapper(prepared)
        return tuple(self._without_wrapper(one) for one in prepared)

    def _without_wrapper(self, prepared: Any) -> Any:
        if not isinstance(prepared, SyncedModule):
            return prepared
        if not any(known is prepared for known in self._unwrapped):
            self._unwrapped.append(prepared)

            def resume(*_: Any) -> None:
                if prepared.method is not None and prepared.module.training and torch.is_grad_enabled():
                    prepared.begin_to_train()

            prepared.module.register_forward_pre_hook(resume, prepend=True)  # before FSDP2 gathers the weights
        return prepared.module
