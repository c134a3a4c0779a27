"""The data of a training: in which order each rank gets it, and what ranks share of their batches."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from copy import copy
from typing import Any, Protocol

from torch.utils.data import DataLoader

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import check_same, on_all_ranks
from lightning_pipesync.data.injection import DataInjection
from lightning_pipesync.data.loaders import (
    batch_size_before_injection,
    num_batches,
    sampler_of,
    with_order,
    with_seed_of_its_own,
)
from lightning_pipesync.data.order import (
    DataSettings,
    in_elastic_order,
    in_order,
    order_in_words,
    replaceable_order,
    resumable,
    with_work_queue,
)
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.data.work_queue import Ask, WorkQueueBatches


class HasPlace(Protocol):
    """What has a place in the data, such as a :class:`TrainLoader`, whose methods these are."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def common(self) -> dict[str, Any] | None: ...

    def skip_ended_epoch(self) -> None: ...

    def redivide(self, place_of_data: tuple[int, int]) -> None: ...


class TrainingData:
    """Follows a method's settings of the training data, or knows that nobody does.

    ``followed`` is true from the first batch of a prepared loader on, or set by an adapter to a framework that follows
    the settings itself. ``steps_per_epoch`` returns the number of steps of an epoch, or None if it is not known. An
    adapter to a framework sets it, or :meth:`prepare`, for which each batch is a step. ``transport`` is replaced when
    there are other ranks. ``between_batches`` is called before a batch of a prepared loader. ``find`` returns the
    training data of the method of that time: an adapter to a framework that attaches another one sets it.

    A method whose members come and go sets ``elastic`` before any loader is prepared. It calls :meth:`redivide` when
    ``transport`` is another one, on all members after the same step, and gives a newcomer the :meth:`position` of
    another member by :meth:`go_to`, and by :meth:`skip_ended_epochs` if the others train already. Preparing a loader
    then is no collective call. An adapter adds to ``loaders`` what it divides itself, and what else has a place in the
    data, such as a Trainer.
    """

    ask: Ask  # for the next batch of a work queue; the method sets it
    steps_per_epoch: Callable[[], int | None]
    elastic = False

    def __init__(self, settings: DataSettings, transport: Transport) -> None:
        self.injection = None if settings.injection is None else DataInjection(*settings.injection, transport)
        self.followed = False
        self.between_batches: Callable[[], object] = lambda: None
        self.find: Callable[[], TrainingData] = lambda: self
        self.steps_per_epoch = lambda: None
        self._settings, self.transport = settings, transport
        self._num_prepared = 0
        self._loaders: list[weakref.ref[HasPlace]] = []
        self._arrived: list[dict[str, Any]] = []  # places of loaders that are yet to be prepared
        self._skips_ended_epochs = False  # whether those do, too
        self._place: tuple[int, int] | None = None  # of which the loaders are; None: as they were prepared

    def prepare(self, loader: DataLoader[Any], seed: int, to_device: Callable[[Any], Any] | None = None) -> TrainLoader:
        """See :meth:`SyncMethod.prepare_train_loader`."""
        find = self.find
        self._num_prepared += 1
        if self.elastic:
            ordered = self._in_order(loader, seed, find)
        else:
            ordered = on_all_ranks(self.transport, lambda: self._in_order(loader, seed, find))

        def steps_per_epoch() -> int | None:
            order = sampler_of(ordered)
            return order.num_batches if isinstance(order, WorkQueueBatches) else num_batches(ordered)

        if not self.elastic:
            check_same(self.transport, [("the number of training batches in an epoch", str(steps_per_epoch()))])
        self.steps_per_epoch = steps_per_epoch

        def finish(batch: Any) -> Any:
            data = find()
            if not data.followed and data.steps_per_epoch() is None:  # the method is another one
                data.steps_per_epoch = steps_per_epoch
            data.followed = True
            injected = data.inject(batch)
            return injected if to_device is None else to_device(injected)

        train_loader = TrainLoader(ordered, finish, lambda: find().between_batches())
        self.add(train_loader)
        return train_loader

    def add(self, loader: HasPlace) -> None:
        """Has :meth:`redivide` divide ``loader``, as long as it exists; a newcomer's goes to where the others are.

        Does nothing if it was added before.
        """
        if any(known is loader for known in self._present()):
            return
        self._loaders = [known for known in self._loaders if known() is not None] + [weakref.ref(loader)]
        if self._place is not None:
            loader.redivide(self._place)
        if self._arrived:
            loader.load_state_dict(self._arrived.pop(0))
            if self._skips_ended_epochs:
                loader.skip_ended_epoch()

    def redivide(self, among: tuple[int, int] | None = None) -> None:
        """Divides what is left of the epoch among the members of ``transport``, from the next batch of each loader on.

        All members call it after the same step; not a collective call. If the members are the same, nothing changes.
        ``among`` (k, n): with this one as the k-th of n members, in place of those of ``transport``.
        """
        self._place = self.transport.place_of_data if among is None else self.transport.place_of_data_among(*among)
        for loader in self._present():
            loader.redivide(self._place)

    def position(self) -> list[dict[str, Any]]:
        """Returns the place of each loader in the order in which they were prepared, for :meth:`go_to` elsewhere.

        Members at the same step whose loaders divide the same data have the same position.
        """
        return [loader.state_dict() for loader in self._present()]

    def common(self) -> list[dict[str, Any]]:
        """Returns what the members must have in common, of each loader whose data are divided, in that order."""
        return [common for loader in self._present() if (common := loader.common()) is not None]

    def go_to(self, position: list[dict[str, Any]]) -> None:
        """Continues at another member's position: the loaders that are prepared, and those that will be.

        Raises:
            ValueError: a loader here has other data; if it is yet to be prepared, :meth:`prepare` raises.
        """
        present = self._present()
        for loader, place in zip(present, position, strict=False):
            loader.load_state_dict(place)
        self._arrived = position[len(present) :]

    def skip_ended_epochs(self) -> None:
        """Begins with the next epoch where nothing is left of the one of :meth:`go_to`, as it is divided now.

        For one that has come while the others train: what it gets of theirs besides is from after that epoch's end,
        such as a scheduler, which its loop must not step for it again.
        """
        self._skips_ended_epochs = True
        for loader in self._present():
            loader.skip_ended_epoch()

    def _present(self) -> list[HasPlace]:
        return [loader for known in self._loaders if (loader := known()) is not None]

    def inject(self, batch: Any) -> Any:
        """Returns ``batch`` with other ranks' rows appended, if data injection is set."""
        return batch if self.injection is None else self.injection(batch)

    def check_followed(self) -> None:
        """Raises a ValueError, on every rank, if nobody follows a setting; called when a gradient is complete."""
        if self.followed:
            return
        if self.elastic and not self._loaders:
            self.followed = True  # once is enough
            warnings.warn(
                "No loader was given to prepare_train_loader(), which divides the data among replicas that come and "
                "go: each trains on what its own loop loads, which has to be data of its own.",
                stacklevel=3,
            )
        ways_out = {
            "injection": "set injection=None",
            "full_pass": "set full_pass=False, also with a SelDPSampler(full_pass=True) of your own",
        }
        if self._settings.partition == "work_queue":
            ways_out["partition"] = "set partition='defdp'"
        for name, way_out in ways_out.items():
            if value := getattr(self._settings, name):
                raise ValueError(
                    f"{name}={value!r} has no effect on a loader that the method does not know: iterate over "
                    f"train_loader = sync.prepare_train_loader(train_loader), or {way_out}."
                )

    def _in_order(self, loader: DataLoader[Any], seed: int, find: Callable[[], TrainingData]) -> DataLoader[Any]:
        """Returns ``loader`` in this rank's order, with the batch size of Eq. 3."""
        if not isinstance(loader, DataLoader):
            raise ValueError(
                "prepare_train_loader() changes the order and the batches of a DataLoader, and this is a "
                f"{type(loader).__name__}: give it the DataLoader itself; or set injection=None, and call a "
                "DataInjection on each batch."
            )
        if self.elastic:
            return with_seed_of_its_own(in_elastic_order(loader, self._settings, self.transport.place_of_data, seed))
        settings, (rank, world_size) = self._settings, self.transport.place_of_data
        samples = batch_size_before_injection(loader, settings.injection, world_size)
        order = replaceable_order(loader, settings, rank, world_size, seed)
        if settings.partition == "work_queue":
            return with_work_queue(loader, order, lambda *asked: find().ask(*asked), self._num_prepared)
        if order is None:
            if settings.full_pass and not getattr(sampler_of(loader), "full_pass", False):
                raise ValueError(
                    f"full_pass=True has no effect on {order_in_words(loader)}: give the loader a "
                    "SelDPSampler(full_pass=True) or no sampler, or set full_pass=False."
                )
            return with_seed_of_its_own(copy(in_order(loader, settings, None, samples)))
        if settings.partition == "seldp":
            return in_order(loader, settings, order, samples)
        return with_seed_of_its_own(with_order(loader, resumable(order), samples))
