"""Translates the hooks of Lightning's strategies into calls of a method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import check_same
from lightning_pipesync.core.faults.failure import PeerWatch, waiting_for_all
from lightning_pipesync.core.rng import set_rng_states
from lightning_pipesync.data.order import begin_at, with_resumable_order
from lightning_pipesync.fabric.job import JobMixin, drop_other_ranks
from lightning_pipesync.lightning.private import (
    change_train_loaders,
    check_clocks,
    no_broadcast_in_handlers,
    no_warning_about_resuming,
)
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.state import CHECKPOINT_KEY, rank_state, section_of, state_of_rank

if TYPE_CHECKING:  # the mixin serves `lightning` and its twin distribution `pytorch_lightning`, whose classes differ
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loops.progress import _ProcessedTracker
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

M = TypeVar("M", bound=Method)


class PipeSyncStrategyMixin(JobMixin, Generic[M], _Base):
    """Base of the Trainer's strategies of all methods.

    Attributes:
        callback_class: the callback that is added to the Trainer.
        method: the method that trains in the current ``fit``; None outside one.
    """

    callback_class: type[Callback]
    method: M | None = None
    _rng_states: dict[str, Tensor] | None = None
    _start: tuple[int, int] = (0, 0)
    _checkpoint_step: int | None = None

    def __init__(self, **arguments: Any) -> None:
        self._until_teardown = ExitStack()
        super().__init__(**arguments)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        for name, instead in self.config.set_by_trainer.items():
            if name in settings:
                raise ValueError(f"{name}={settings[name]!r} cannot be set under the Trainer: set {instead}.")

    # --- set-up and end ---------------------------------------------------------------------------------------------

    def _begin_to_attach(self, trainer: Trainer) -> None:
        check_clocks(trainer)
        self._until_teardown = ExitStack()
        self._until_teardown.enter_context(no_broadcast_in_handlers(trainer, self._handle_sigterm))
        self._add_callback(trainer, first=True)  # before all others, so that they read consolidated weights

    def _handle_sigterm(self, number: int, frame: Any) -> bool:
        """Returns whether the method ends the training in order, sooner or later."""
        return False

    def _check_checkpoint(self) -> None:
        """Checks that all ranks resume from the same step: those with more steps left would wait for ever."""
        step = self._checkpoint_step
        found = ("the checkpoint from which they resume", "none" if step is None else f"one of step {step}")
        remedy = "Keep the checkpoints in a folder that all machines share, and resume from there."
        check_same(self._transport.job, [found], remedy)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Reports the exception to the other ranks, whose errors then name this rank on their last line."""
        super().on_exception(exception)
        self.report(exception)

    def report(self, exception: BaseException) -> None:
        """Does so before other callbacks learn of it, of which one may raise, or take long to save a checkpoint."""
        for watch in (self._watch, self._job_watch):
            if watch is not None:
                watch.close(exception)

    @override
    def teardown(self) -> None:
        self._checkpoint_step = None
        if self.method is not None:
            # After an error peers may be gone, and what is in flight may never arrive.
            self.method.detach(timeout_s=1.0 if self._interrupted else 10.0)
            self.method = None
        self._until_teardown.close()
        super().teardown()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks, unless after an error: saving a checkpoint would then wait for a rank that is gone."""
        if not self._interrupted:
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns rank 0's object; after an error this rank's own."""
        return obj if self._interrupted else super().broadcast(obj, *args, **kwargs)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the tensor reduced over all ranks; after an error this rank's own."""
        if self._interrupted:
            return tensor
        with waiting_for_all(self._watch):
            return super().reduce(tensor, *args, **kwargs)

    # --- training ---------------------------------------------------------------------------------------------------

    def check_num_batches(self) -> None:
        """Checks that all ranks have the same number of training batches: those with more would wait for ever."""
        number = ("the number of training batches in an epoch", str(self._trainer.num_training_batches))
        remedy = "Give all the same number of samples, or set Trainer(limit_train_batches=...) to the smallest number."
        check_same(self._transport.job, [number], remedy)

    def join(self) -> None:
        """Called at the start of the training, before ``on_train_start`` of other callbacks."""

    def begin_epoch(self) -> None:
        """Called at the start of an epoch, before ``on_train_epoch_start`` of other callbacks."""

    @abstractmethod
    def after_backward(self, optimizer: Optimizer) -> None:
        """Called after the gradient is unscaled and before it is clipped."""

    @abstractmethod
    def flush(self) -> None:
        """Consolidates the weights. Does nothing outside ``fit`` and after an error."""

    @abstractmethod
    def end_training(self) -> None:
        """Called at the end of the training, before ``on_train_end`` of other callbacks."""

    def end_batch(self) -> None:
        """Called after a training batch, before ``on_train_batch_end`` of other callbacks."""

    def share_metrics(self) -> None:
        """Makes the logged metrics those of all ranks, before other callbacks read them."""

    @property
    def has_ended(self) -> bool:
        """Whether the training ends with this epoch, for the ranks have taken ``max_steps`` together."""
        return False

    def note_epoch_end(self, num_batches: int | None) -> None:
        """Publishes after how many batches this rank has ended its epoch; None: it trains."""
        if self._watch is not None:
            ahead = None if num_batches is None else f"it has ended its epoch after {num_batches} batches"
            self._watch.ahead = ahead

    def resume(self) -> None:
        """Continues the training after :meth:`flush`."""
        self._restore_rng()

    def resume_loader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Returns the training loader; in a resumed run it starts at the next unseen batch, if its order is known."""
        if self._start != (0, 0) and not self._overfitting:
            dataloader = with_resumable_order(dataloader)
        if begin_at(dataloader, *self._start, on_skip=self._restore_rng):
            self._until_teardown.enter_context(no_warning_about_resuming())
        else:
            self._restore_rng()  # the loader draws a random number when an epoch begins
        return dataloader

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        weights_only = "optimizer_states" not in checkpoint
        if self.method is not None and not weights_only and not self._interrupted:
            checkpoint[CHECKPOINT_KEY] = section_of(self.name, self.config, self._transport, self.rank_state_dict)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(  # type: ignore[override]  # Fabric and the Trainer name the path differently
        self, checkpoint_path: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._checkpoint_step = checkpoint.get("global_step")
        drop_other_ranks(checkpoint)  # which a CheckpointIO of the user's has loaded
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the states of the optimizers; within ``fit`` also that of this rank."""
        super().load_optimizer_state_dict(checkpoint)
        if self.method is None:  # as in the process that has spawned the ranks
            return
        saved = checkpoint.get(CHECKPOINT_KEY)
        self._start = self._position()
        if saved is not None and saved["world_size"] != self.world_size:  # its batches were divided differently
            self._start = (self._start[0], 0)
        state = state_of_rank(saved, self.name, self._transport, self.config)
        if state is not None:
            self.attached.load_state_dict(state["method"])
            if "precision" in state:
                self.precision_plugin.load_state_dict(state["precision"])
            # Restored when the loader begins an epoch, or fetches its next batch within one: its set-up draws, too.
            self._rng_states = state["rng"]
            self.load_place(state.get("place"))
        # If configure_optimizers reads the number of steps, the loaders are set up before the checkpoint is loaded.
        change_train_loaders(self._trainer, self.resume_loader)

    def load_place(self, place: dict[str, Any] | None) -> None:
        """Loads what :meth:`rank_state_dict` has returned as the place in the data; None: nothing."""

    def rank_state_dict(self) -> dict[str, Any]:
        """Returns the state that this rank needs, besides a plain checkpoint, to resume bit for bit."""
        return rank_state({"method": self.attached.state_dict()}, self.precision_plugin.state_dict(), self.root_device)

    def _restore_rng(self) -> None:
        """Restores the random state of the interrupted run."""
        if self._rng_states is not None:
            set_rng_states(self._rng_states, self.root_device)
            self._rng_states = None

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> M:
        if self.method is None:
            raise RuntimeError(f"strategy={self.name!r} has a method only within Trainer.fit().")
        return self.method

    @property
    def _transport(self) -> Transport:
        return cast("Transport", self.attached.transport)  # None only if all stages run in one process

    @property
    def _module(self) -> LightningModule:
        return cast("LightningModule", self.lightning_module)  # set before any other hook is called

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _watch(self) -> PeerWatch | None:
        """The watch of the method, or of the job until there is one."""
        return self._job_watch if self.method is None else self._transport.watch

    def _add_callback(self, trainer: Trainer, first: bool) -> None:
        """Adds the callback to the Trainer unless it is there; with ``first``, as the first of its callbacks."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        present = next((callback for callback in callbacks if isinstance(callback, self.callback_class)), None)
        if present is not None and first:
            callbacks.remove(present)
        if present is None or first:
            callbacks.insert(0 if first else len(callbacks), present or self.callback_class())

    @property
    def _fitting(self) -> bool:
        return self._trainer.state.fn == "fit"

    @property
    def _interrupted(self) -> bool:
        """Whether an exception is being handled, so that a collective operation could hang."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.interrupted

    @property
    def _overfitting(self) -> bool:
        return bool(self._trainer.overfit_batches)  # type: ignore[attr-defined]

    @property
    def _traffic_backend(self) -> str | None:
        """``"gloo"`` if the user has set it; otherwise None: the transport chooses by the device."""
        return "gloo" if self.process_group_backend == "gloo" else None

    def _position(self) -> tuple[int, int]:
        """Returns the epoch of the loaded progress, and the number of its batches that were trained.

        If it was saved on an exception, the one that was under way does not count: ``fit`` begins with it.
        """
        loop = self._trainer.fit_loop
        epochs = cast("_ProcessedTracker", loop.epoch_progress.current)
        batches = loop.epoch_loop.batch_progress
        if epochs.processed == epochs.started:
            return epochs.processed, 0
        trained = cast("_ProcessedTracker", batches.current).processed
        has_ended = batches.is_last_batch and trained == batches.current.ready
        return (epochs.processed + 1, 0) if has_ended else (epochs.processed, trained)
