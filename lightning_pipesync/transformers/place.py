"""transformers' Trainer in jobs that come and go: its training loader, and where it is in its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState

from lightning_pipesync.accelerate.elastic import ElasticLoader
from lightning_pipesync.data import TrainLoader
from lightning_pipesync.data.loaders import num_batches
from lightning_pipesync.training.place import check_common
from lightning_pipesync.transformers.private import count_logs_from_here

if TYPE_CHECKING:
    from transformers import Trainer

#: In place of a checkpoint from which a Trainer resumes.
OTHERS = "the state of the other replicas"

#: What all jobs must have in common.
STEPS = "steps in an epoch"

#: What a new job gets of the Trainer's state; all jobs have the rest, or it is of their own files.
FIELDS = (
    "global_step",
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
)


class StepsLoader(ElasticLoader):
    """A training loader whose epochs are the Trainer's: of a fixed number of batches.

    The Trainer counts steps before the training, for ``max_steps`` and schedulers. So its epoch has as many batches as
    the data with the replicas with which training begins. With fewer or more of them, the data go on from one of their
    epochs to the next within it.

    Args:
        loader: what counts epochs and batches of the data.
        join: joins the other replicas, once.
    """

    def __init__(self, loader: TrainLoader, join: Callable[[], None]) -> None:
        super().__init__(loader, join)
        self._length = num_batches(loader)
        self._has_begun, self._skipped = False, 0

    def __len__(self) -> int:
        """Returns the number of batches of an epoch of the Trainer; a TypeError, if the data set does not know it."""
        return len(self.loader) if self._length is None else self._length

    def _begin_epoch(self) -> None:
        self._has_begun = True
        if self.loader.num_batches and self._is_last():
            self.loader.set_epoch(self.loader.epoch + 1)
        else:
            self.loader.load_state_dict(self.loader.state_dict())  # goes on where it is

    def _batches(self) -> Iterator[Any]:
        """Iterates over the batches from here on; the Trainer stops at the end of its epoch."""
        is_empty = False  # what is left of an epoch may be
        while not is_empty:
            is_empty = self.loader.num_batches == 0
            for batch in self.loader:
                is_empty = False
                yield batch

    def skip_first_batches(self, num_batches: int) -> StepsLoader:
        """Has the epoch that is set next begin after so many batches, unless the place in the data is known."""
        self._skipped = num_batches
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begins with this epoch, if nothing has told the place in the data: no checkpoint, and no other replica."""
        if not self._has_begun and (self.loader.epoch, self.loader.num_batches) == (0, 0):
            self.loader.load_state_dict({"epoch": epoch, "num_batches": self._skipped})


class TrainerPlace:
    """The place of a Trainer, of which another job's Trainer gets the state before its first step.

    Args:
        trainer: in ``train()``.
        steps_per_epoch: the number of its steps in an epoch.
    """

    def __init__(self, trainer: Trainer, steps_per_epoch: int) -> None:
        self._trainer, self._steps_per_epoch = trainer, steps_per_epoch
        self._has_moved = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress, and the states of callbacks that have one, by class."""
        states: dict[str, list[Any]] = {}
        for callback in self._exportable():
            states.setdefault(type(callback).__name__, []).append(callback.state()["attributes"])
        state = {name: getattr(self._trainer.state, name) for name in FIELDS}
        return {**state, STEPS: self._steps_per_epoch, "callbacks": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to another Trainer's place.

        Raises:
            ValueError: its epochs have another number of steps; or this Trainer has resumed after the epoch of that
                place, and cannot go back.
        """
        trainer, begun = self._trainer, self._trainer.state.global_step // self._steps_per_epoch
        way_out = "give all the same data, batch size, gradient_accumulation_steps and num_replicas"
        check_common({STEPS: (self._steps_per_epoch, way_out)}, state)
        if state["global_step"] // self._steps_per_epoch < begun:
            raise ValueError(
                f"This replica has resumed from a checkpoint of step {trainer.state.global_step}, and the others are "
                f"at step {state['global_step']}, in an epoch before: resume from another checkpoint, or from none."
            )
        self._has_moved = state["global_step"] != trainer.state.global_step
        for name in FIELDS:
            setattr(trainer.state, name, state[name])
        for callback in self._exportable():
            for name, value in (state["callbacks"].get(type(callback).__name__) or [{}]).pop(0).items():
                setattr(callback, name, value)
        count_logs_from_here(trainer)

    def begun(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the arguments of the Trainer's epoch from this place on; None if the epoch is over.

        ``given`` are the arguments with which the Trainer would begin it.
        """
        trainer, epoch = self._trainer, given["epoch"]
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            return None
        present, steps = divmod(trainer.state.global_step, self._steps_per_epoch)
        if not self._has_moved or epoch > present:
            return given
        if epoch < present:
            return None
        self._has_moved = False
        batches = steps * trainer.args.gradient_accumulation_steps
        start = {"epochs_trained": epoch, "steps_trained_in_current_epoch": batches}
        return {**given, **start, "resume_from_checkpoint": OTHERS if steps else None}

    def _exportable(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
