"""Trainers that join each other, as jobs whose replicas come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_pipesync.core.faults.notice import STATUS
from lightning_pipesync.lightning.place import TrainerPlace
from lightning_pipesync.lightning.private import begin_next_epoch, end_after_batch, no_warning_about_resuming
from lightning_pipesync.lightning.sharded import ShardedModuleMixin
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.place import HandedOver

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class JoiningMixin(ShardedModuleMixin):
    """Begins the training where the other jobs are, and saves the place in the data."""

    _place: TrainerPlace | None = None  # None: all replicas are ranks of this job

    def _begin_to_join(self, trainer: Trainer) -> None:
        """Makes the place, before a loader is set up: its length decides how long schedulers are."""
        self._place = None
        if trainer.state.fn == "fit" and self.config.num_jobs is not None:
            rank, number = self._place_of_data
            self._place = TrainerPlace(trainer, (rank, number * self.config.num_jobs))

    def _prepare_to_join(self, method: SyncMethod) -> None:
        """Tells the method what another job gets from this one."""
        if self._place is None:
            return
        method.data.add(self._place)
        configs = self._trainer.lr_scheduler_configs
        method.hand_over(trainer=HandedOver(lambda: {"schedulers": [config.scheduler for config in configs]}))

    def join(self) -> None:
        """See the base class; where a run resumes, other callbacks find the consolidated weights next."""
        if self._place is not None:
            self._place.check()
            self._until_teardown.enter_context(no_warning_about_resuming())
            begin_next_epoch(self._trainer)
            self.attached.join()
        elif self._checkpoint_step is not None and self.attached.resumes_with_own_weights:
            self.flush()

    def _handle_sigterm(self, number: int, frame: Any) -> bool:
        return self.method is not None and self.method.handle_sigterm(number, frame)

    def end_batch(self) -> None:
        super().end_batch()
        if self._has_left:
            end_after_batch(self._trainer)

    def report(self, exception: BaseException) -> None:
        if self._place is not None and isinstance(exception, SystemExit) and exception.code is None:
            exception.code = STATUS  # that of Lightning after a SIGTERM would count as success
        if not self._has_left:
            super().report(exception)

    @property
    def _has_left(self) -> bool:
        """Whether the method has left the other jobs: then all ranks of this one end after the same batch."""
        return self.method is not None and self.method.has_left

    @property
    def _interrupted(self) -> bool:
        return super()._interrupted and not self._has_left

    def begin_epoch(self) -> None:
        if self._place is not None:
            self._place.begin_epoch()

    def rank_state_dict(self) -> dict[str, Any]:
        place = {} if self._place is None else {"place": self._place.place()}
        return {**super().rank_state_dict(), **place}

    def load_place(self, place: dict[str, Any] | None) -> None:
        if self._place is not None:
            epoch, num_batches = self._start
            if place is None or place["epoch"] != epoch:  # it was the last batch of its epoch
                place = {"epoch": epoch, "num_batches": num_batches}
            self._place.resume(place)
