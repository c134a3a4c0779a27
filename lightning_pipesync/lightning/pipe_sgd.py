"""``Trainer(strategy="pipe_sgd")``."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.lightning.averaging import AveragingStrategyMixin
from lightning_pipesync.lightning.private import run_hooks_before_step
from lightning_pipesync.methods.pipe_sgd import PipeSGD, PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.config import DelayCompensation

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision


class PipeSGDStrategyMixin(AveragingStrategyMixin):
    """Pipe-SGD: the all-reduce of one step runs under the next, whose gradients are exactly k steps stale.

    Logs ``pipe_sgd/updates``, ``pipe_sgd/staleness``, ``pipe_sgd/mib_sent`` and ``pipe_sgd/exposed_seconds``. The
    Trainer counts a step for each gradient that was computed; ``staleness`` of them have not been applied yet. In
    ``on_before_optimizer_step``, ``p.grad`` is the averaged gradient that is about to be applied; it is zero in the
    first ``staleness`` steps, which make no update.

    Args:
        staleness: k: how many steps later a gradient is applied; 0: synchronous SGD.
        compression: codec of the all-reduce: none, bf16, fp16, truncate16, int8, topk.
        error_feedback: whether what a lossy codec drops is added to what is sent next.
        pipeline_level: 1: the gradient travels after the backward pass; 2: in segments, as soon as they are ready.
        segments: pieces into which level 2 divides the gradient.
        warmup_steps: synchronous steps before the pipeline fills.
        bucket_mb: MiB that travel in one piece at level 1; None: the whole gradient.
        drain: whether the last ``staleness`` gradients are applied when the training ends, before the ``on_train_end``
            of callbacks and after the last validation; otherwise they are dropped.
        delay_compensation: ``"prediction"``: a gradient is computed at the weights that the updates on their way would
            lead to, were the averages in them this rank's own gradients; ``"momentum"``: the same with gradients of
            zero; ``"none"``: at the weights as they are, as in the paper; ``"staleness"``: so, and the learning rate is
            divided by the number of updates that the gradient is late, by 1 with ``staleness=1``; ``"distance"``: it is
            at most ``distance_constant`` over the squared distance that the weights have moved since.
        distance_constant: C of ``delay_compensation="distance"``.
        checkpoint_own_gradients: whether a checkpoint holds each rank's own part of the gradients in flight,
            ``staleness`` times the weights for every rank; without, a resumed run is not the uninterrupted one bit for
            bit.
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

    name = "pipe_sgd"
    shown_metrics = ("mib_sent",)
    checkpoint_replicas = True
    method: PipeSGD | None = None

    def __init__(
        self,
        staleness: int = 1,
        compression: Codec | str = "none",
        error_feedback: bool = True,
        pipeline_level: Literal[1, 2] = 1,
        segments: int = 4,
        warmup_steps: int = 0,
        bucket_mb: float | None = None,
        drain: bool = False,
        delay_compensation: DelayCompensation = "prediction",
        distance_constant: float = 1.0,
        checkpoint_own_gradients: bool = True,
        timeout_s: float = 1800.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self.config = PipeSGDConfig(
            staleness=staleness,
            compression=compression,
            error_feedback=error_feedback,
            pipeline_level=pipeline_level,
            segments=segments,
            warmup_steps=warmup_steps,
            bucket_mb=bucket_mb,
            drain=drain,
            delay_compensation=delay_compensation,
            distance_constant=distance_constant,
            checkpoint_own_gradients=checkpoint_own_gradients,
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

    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> PipeSGD:
        return PipeSGD(module, optimizers, self.config, backend=self._traffic_backend)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step with the predicted weights, which it may read outside of any module's forward pass, too."""
        assert self.method is not None
        self.method.use_predicted_weights()
        result = super().training_step(*args, **kwargs)
        if not self._automatic:
            self.method.restore_true_weights()  # its optimizers have stepped, and callbacks look
        return result

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(*args, **kwargs)
        if self.method is not None and self._automatic:
            self.method.restore_true_weights()  # this was the only graph, and no step may follow
        return loss

    @property
    def _automatic(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization

    def end_training(self) -> None:
        if self.method is not None and self.config.drain and not self._interrupted:
            self.method.drain(partial(run_hooks_before_step, self.precision_plugin, self.lightning_module))
        super().end_training()
