"""When DeAR's collectives start under the backward pass."""

from __future__ import annotations

from torch import Tensor

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.methods.dear.bucket import FusedBucket
from lightning_pipesync.methods.dear.early_gathers import EagerGathers
from lightning_pipesync.methods.dear.fused_buckets import FusedBuckets
from lightning_pipesync.methods.dear.fusion_search import FusionTuner
from lightning_pipesync.methods.gradients.backpipe import BackPipePolicy
from lightning_pipesync.methods.gradients.feedpipe import ExecutionOrder, FeedPipe
from lightning_pipesync.methods.step import Stage
from lightning_pipesync.methods.sync_method import SyncMethod


class DeARPolicy(BackPipePolicy):
    """Reduce-scatters start in passes that synchronize; early all-gathers follow them."""

    def __init__(
        self,
        sync: SyncMethod,
        fused: FusedBuckets,
        order: ExecutionOrder,
        tuner: FusionTuner,
        early: EagerGathers,
        queue: CommQueue,
        feedpipe: FeedPipe[FusedBucket],
    ) -> None:
        self._sync, self._fused, self._order, self._tuner = sync, fused, order, tuner
        self._early, self._queue, self._feedpipe = early, queue, feedpipe
        self.loaded = False  # whether weights were, since the last collective

    def may_start(self, parameter: Tensor) -> bool:
        """See the base class; observes the order of gradients, too."""
        if not self._sync.syncing:
            return False
        self._order.gradient_is_ready(parameter)
        # New buckets come after this pass; and only a step tells whose gradients are applied, if not all are.
        return self._sync.reduces_together and not self._tuner.change_due

    def before_first(self) -> None:
        """Blocks until no communication is in flight and all weights are up to date."""
        self._queue.wait_all()
        self._feedpipe.wait()
        if self.loaded:
            self.loaded = False
            self._fused.drop_residuals()
        elif self._sync.reduces_together and self._sync.record.stage(0) > Stage.ACCUMULATING:
            self._fused.drop_residuals(0)  # the last gradient was reduced, and not applied

    def after_loading(self, *_: object) -> None:
        """Notes that weights were loaded: what was not sent of the former ones, and of their gradients, is dropped."""
        self.loaded = True

    def outdated(self) -> None:
        """Raises a RuntimeError if the first pass has left most of a gradient already, to which it would be added."""
        config = self._sync.config
        if config.low_rank is not None or (config.uses_error_feedback and get_codec(config.compression).sparse):
            used = f"compression={config.compression!r} with error_feedback=True has encoded"
            if config.low_rank is not None:
                used = f"low_rank={config.low_rank!r} has factorized"
            raise RuntimeError(
                f"{used} this gradient already, and a further backward pass changes it: "
                "put all backward passes of a step but the last under no_sync() (in a LightningModule: "
                "self.trainer.strategy.block_backward_sync()), take each step that has begun, checkpoint a layer that "
                "runs several times with use_reentrant=False, or set error_feedback=False, or low_rank=None."
            )

    def started(self, index: int) -> None:
        self._early.start_after(index, self._queue)
