"""Where a Trainer is in its training and in the data, in jobs that come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lightning_pipesync.data.elastic import ElasticOrder
from lightning_pipesync.data.order import DataSettings, in_elastic_order
from lightning_pipesync.lightning.private import (
    check_progress,
    go_to_progress,
    num_train_loaders,
    position_of,
    progress_of,
    restart_train_loader,
    set_num_batches,
)

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

    def redivide(self, place_of_data: tuple[int, int]) -> None:
        """Divides what is left of the epoch from the next batch on: this is now the k-th of n members, as in (k, n)."""
        self._place_of_data = place_of_data
        if self._order is not None and self._order.divide(place_of_data, *position_of(self._trainer)):
            restart_train_loader(self._trainer)
