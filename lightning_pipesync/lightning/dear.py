"""``Trainer(strategy="dear")``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.storage import unshare_storage
from lightning_pipesync.fabric.private import unwrapped
from lightning_pipesync.lightning.averaging import AveragingStrategyMixin
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.dear.config import FusionMethod, Topology, Update

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision


class DeARStrategyMixin(AveragingStrategyMixin):
    """DeAR: synchronous SGD, the all-reduce hidden under the backward pass and the next forward pass.

    What is trained is what ``strategy="ddp"`` would train. Logs ``dear/mib_sent``, ``dear/exposed_seconds`` and
    ``dear/buckets``. In ``on_before_optimizer_step``, ``p.grad`` is this rank's own gradient: the average of all is
    never put together on one rank.

    Args:
        update: ``"sharded"``: each rank updates its shard of the weights, which are gathered; ``"replicated"``: the
            gradients are gathered, and each rank updates all. None: sharded, if the optimizer allows it.
        elementwise: further optimizers that treat every value by itself, so that they can be sharded.
        fusion: what travels in one piece: ``"bo"``: up to a size that Bayesian optimization finds while the training
            goes on (``"random"`` and ``"grid"`` search in other ways); ``"buffer"``: up to ``bucket_mb``; ``"layers"``:
            ``num_layers``; ``"none"``: every tensor by itself.
        bucket_mb: MiB that travel in one piece; in a search, what is tried first.
        edge_mb: MiB of the first and the last piece, from which they double towards the middle; None: all are alike.
        search_mb: smallest and largest size that a search tries, in MiB.
        trial_steps: steps that a search measures with one size.
        max_trials: sizes that a search tries at most.
        tuning_file: JSON file from which a search starts, and in which it keeps what was measured.
        num_layers: layers that travel in one piece, with ``fusion="layers"``.
        compression: codec of both halves: none, bf16, fp16, truncate16, int8 or topk.
        error_feedback: whether what a lossy codec drops is added to what is sent next.
        topology: ``"flat"``: every rank with every other; ``"torus2d"``: along rows of neighbors, then across them.
        torus_columns: ranks in a row of the torus; None: those of a host if there are several, else as square as
            possible.
        timeout_s: seconds after which a rank that does not answer counts as lost.
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy; with ``"gloo"``, CUDA tensors travel through the host.
        start_method: as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    name = "dear"
    shown_metrics = ("mib_sent",)
    checkpoint_replicas = True
    method: DeAR | None = None

    def __init__(
        self,
        update: Update | None = None,
        elementwise: tuple[type[Optimizer], ...] = (),
        fusion: FusionMethod = "bo",
        bucket_mb: float = 25.0,
        edge_mb: float | None = None,
        search_mb: tuple[float, float] = (1.0, 100.0),
        trial_steps: int = 10,
        max_trials: int = 20,
        tuning_file: str | None = None,
        num_layers: int = 4,
        compression: Codec | str = "none",
        error_feedback: bool = True,
        topology: Topology = "flat",
        torus_columns: int | None = None,
        timeout_s: float = 1800.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self.config = DeARConfig(
            update=update,
            elementwise=elementwise,
            fusion=fusion,
            bucket_mb=bucket_mb,
            edge_mb=edge_mb,
            search_mb=search_mb,
            trial_steps=trial_steps,
            max_trials=max_trials,
            tuning_file=tuning_file,
            num_layers=num_layers,
            compression=compression,
            error_feedback=error_feedback,
            topology=topology,
            torus_columns=torus_columns,
            timeout_s=timeout_s,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            start_method=start_method,
        )

    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> DeAR:
        config = self.config.on_hosts_of(self.num_processes, self.world_size)
        return DeAR(module, optimizers, config, backend=self._traffic_backend)

    @override
    def on_train_end(self) -> None:
        """Has the optimizers keep their state, for a checkpoint that is saved after the training."""
        super().on_train_end()
        if self.method is not None and not self._interrupted:
            self.method.return_optimizer_states()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        return state if self.method is None else unshare_storage(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state, as DDP's optimizer would have it, on every rank."""
        if self.method is None:
            return super().optimizer_state(optimizer)
        if self._interrupted:
            rank_zero_warn(
                "The checkpoint is saved after an error, when the other ranks may be gone. Each rank has but a part of "
                "the optimizer's state, so it holds none: a run that goes on from it begins with a new optimizer state."
            )
            return super().optimizer_state(optimizer)
        return self.method.optimizer_state_dict(unwrapped(optimizer))
