"""``Trainer(strategy="selsync")``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.data.loaders import batch_size_before_injection, sampler_of, with_order, with_seldp
from lightning_pipesync.lightning.loaders import can_use_seldp, check_num_samples
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig
from lightning_pipesync.methods.selsync.config import Aggregation, Partition

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import LightningModule
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision


class SelSyncStrategyMixin(PipeSyncStrategyMixin):
    """SelSync: local steps, synchronized only when some rank's gradient changes by more than ``delta``.

    By default ``delta`` finds itself: four steps of five stay local.

    Logs ``selsync/lssr`` (the share of local steps), ``selsync/relative_gradient_change`` (this rank's),
    ``selsync/delta``, ``selsync/mib_sent`` and ``selsync/exposed_seconds``.

    Args:
        delta: threshold on the relative gradient change. 0: every step is synchronized; ``inf``: none is; ``"auto"``:
            follows the changes so that the share ``lssr`` of the steps stays local.
        lssr: with ``delta="auto"``, the share of the steps that are to stay local, in [0, 1).
        aggregation: what a synchronized step averages: ``"parameters"`` after the update, or ``"gradients"`` before it.
        window: number of steps over which the squared gradient norm is smoothed.
        smoothing: smoothing factor of the moving average, in (0, 1]. The paper's is number of ranks / 100.
        outer_lr: how far a synchronized step goes from the last common weights to the average; 1: to the average.
        outer_momentum: Nesterov momentum of these steps, in [0, 1), as in DiLoCo. ``"auto"``: 0.3 with ``delta="auto"``
            and an optimizer of Adam's kind, otherwise 0.
        partition: ``"seldp"`` rotates the chunks of the training data by rank; ``"defdp"`` leaves Lightning's order.
        full_pass: with SelDP, an epoch is a rank's whole queue of chunks instead of one chunk.
        injection: (alpha, beta): each step a share alpha of the ranks sends a share beta of its batch to all others.
        compression: codec of a synchronized step: none, bf16, fp16, truncate16, int8 or topk.
        error_feedback: whether what a lossy codec drops is added to what is sent next.
        bucket_mb: MiB that travel in one piece.
        timeout_s: seconds after which a rank that does not answer counts as lost.
        checkpoint_replicas: whether a checkpoint holds each rank's own weights and optimizer state.
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

    name = "selsync"
    shown_metrics = ("lssr", "relative_gradient_change", "mib_sent")
    config: SelSyncConfig
    method: SelSync | None

    def __init__(
        self,
        delta: float | Literal["auto"] = "auto",
        lssr: float = 0.8,
        aggregation: Aggregation = "parameters",
        window: int = 25,
        smoothing: float = 0.16,
        outer_lr: float = 1.0,
        outer_momentum: float | Literal["auto"] = "auto",
        partition: Partition = "seldp",
        full_pass: bool = False,
        injection: tuple[float, float] | None = None,
        compression: Codec | str = "none",
        error_feedback: bool = True,
        bucket_mb: float = 25.0,
        timeout_s: float = 1800.0,
        checkpoint_replicas: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self.config = SelSyncConfig(
            delta=delta,
            lssr=lssr,
            aggregation=aggregation,
            window=window,
            smoothing=smoothing,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            partition=partition,
            full_pass=full_pass,
            injection=injection,
            compression=compression,
            error_feedback=error_feedback,
            bucket_mb=bucket_mb,
            timeout_s=timeout_s,
            checkpoint_replicas=checkpoint_replicas,
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
        self.checkpoint_replicas = checkpoint_replicas

    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> SelSync:
        injection = self.config.injection
        step = cast("LightningModule", module).training_step
        if injection is not None and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ValueError(
                f"injection={injection} cannot reach the batches of a training_step(dataloader_iter), which takes "
                "them from the loader itself: write training_step(batch, batch_idx), or set injection=None."
            )
        method = SelSync(module, optimizers, self.config, backend=self._traffic_backend)
        method.data.followed = True  # by process_dataloader and batch_to_device
        return method

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.method is not None and self.method.data.injection is not None and self._training:
            batch = self.method.data.injection(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Gives the training loader SelDP's order and, with data injection, the batch size of Eq. 3.

        Raises:
            ValueError: the data set has fewer samples than there are ranks, or data injection a loader without batches.
        """
        dataloader = super().process_dataloader(dataloader)
        if not self._training or not isinstance(dataloader, DataLoader):
            return dataloader
        check_num_samples(dataloader, self.world_size)
        samples = None
        if self.config.injection is not None:
            samples = batch_size_before_injection(dataloader, self.config.injection, self.world_size)
        if self.config.partition == "seldp" and not self._overfitting and can_use_seldp(dataloader):
            dataloader = with_seldp(
                dataloader,
                sampler_of(dataloader),
                full_pass=self.config.full_pass,
                num_samples=samples,
                limit=self._batch_limit,
            )
        elif samples is not None:
            dataloader = with_order(dataloader, sampler_of(dataloader), samples)
        return self.begin_where_stopped(dataloader)
