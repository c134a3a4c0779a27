"""Trainers that join each other, as jobs whose replicas come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lightning_pipesync.core.faults.notice import STATUS
from lightning_pipesync.data.elastic import ElasticOrder
from lightning_pipesync.data.order import DataSettings, in_elastic_order
from lightning_pipesync.lightning.private import (
    begin_next_epoch,
    check_progress,
    end_after_batch,
    go_to_progress,
    no_warning_about_resuming,
    num_train_loaders,
    position_of,
    progress_of,
    restart_train_loader,
    set_num_batches,
    skip_ended_epoch,
)
from lightning_pipesync.lightning.sharded import ShardedModuleMixin
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.place import HandedOver

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainerPlace:
    """The place of a Trainer and of its training loader, the same in all jobs whose replicas train together.

    Epochs end where the data do, however they are divided: so the Trainer's number of batches follows the members. It
    has one training loader.

    Args:
        trainer: the Trainer, in ``fit``.
        place_of_data: (k, n): this is the k-th of n members, until :meth:`redivide`.
    """

    def __init__(self, trainer: Trainer, place_of_data: tuple[int, int]) -> None:
        self._trainer, self._place_of_data = trainer, place_of_data
        self._order: ElasticOrder | None = None  # None: the loader is not set up
        self._saved: dict[str, Any] | None = None  # the place of a checkpoint, until the loader is set up

    def divided(self, loader: DataLoader[Any], settings: DataSettings) -> DataLoader[Any]:
        """Returns the training loader with this member's share of its data."""
        divided = in_elastic_order(loader, settings, self._place_of_data, seed=None)
        self._order = ElasticOrder(divided)
        if self._saved is not None:
            self.resume(self._saved)
        return divided

    def check(self) -> None:
        """Raises a ValueError if the Trainer has several training loaders."""
        check_progress(self._trainer)
        if (number := num_train_loaders(self._trainer)) > 1:
            raise ValueError(
                f"The Trainer has {number} training loaders, and replicas that come and go divide the data of one: "
                "make one loader of them, whose data set has the samples of all."
            )

    def begin_epoch(self) -> None:
        """Tells the Trainer how many batches the epoch has that begins."""
        if self.common() is not None:
            set_num_batches(self._trainer)

    def resume(self, saved: dict[str, Any]) -> None:
        """Begins at the place in the data of a checkpoint."""
        self._saved = saved if self._order is None else None
        if self._order is not None:
            self._order.go_to(saved)

    def place(self) -> dict[str, Any]:
        """Returns the place in the data, after the present batch."""
        epoch, num_batches = position_of(self._trainer)
        if self._order is None:
            return {"epoch": epoch, "num_batches": num_batches}
        return self._order.place(epoch, num_batches)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the data, and the Trainer's progress when the present batch will be done."""
        return {**self.place(), "progress": progress_of(self._trainer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to another job's place, at the start of the training; the next batch is the one after its last.

        Raises:
            ValueError: the other job has other data.
        """
        there = dict(state)
        go_to_progress(self._trainer, there.pop("progress"))
        epoch, num_batches = position_of(self._trainer)
        if self._order is None or self.common() is None:
            return
        self._order.go_to(there)
        if epoch != there["epoch"]:  # there it was the last batch of an epoch
            self._order.begin_at(epoch, num_batches)
        restart_train_loader(self._trainer)

    def common(self) -> dict[str, Any] | None:
        """Returns what the jobs must have in common; None if the order is the user's own."""
        return None if self._order is None else self._order.common()

    def skip_ended_epoch(self) -> None:
        """Begins with the next epoch, if those who are there now cannot divide what was left of the present one."""
        if skip_ended_epoch(self._trainer) and self._order is not None:
            self._order.begin_at(*position_of(self._trainer))
            restart_train_loader(self._trainer)

    def redivide(self, place_of_data: tuple[int, int]) -> None:
        """Divides what is left of the epoch from the next batch on: this is now the k-th of n members, as in (k, n)."""
        self._place_of_data = place_of_data
        if self._order is not None and self._order.divide(place_of_data, *position_of(self._trainer)):
            restart_train_loader(self._trainer)


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
