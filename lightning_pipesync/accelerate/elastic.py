"""The training loader of jobs that come and go, each with an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from lightning_pipesync.accelerate.private import prepared_loaders
from lightning_pipesync.data import TrainLoader
from lightning_pipesync.data.elastic import ElasticSampler
from lightning_pipesync.data.loaders import LoaderWrapper, sampler_of, with_seed_of_its_own
from lightning_pipesync.data.order import in_elastic_order
from lightning_pipesync.methods.settings import Settings


class Lookahead(LoaderWrapper):
    """A loader that fetches one batch ahead, and so knows which one is the last.

    Attributes:
        at_end: whether the present batch is the last.
    """

    at_end = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches, nothing = iter(self.loader), object()
        ahead = next(batches, nothing)
        while ahead is not nothing:
            batch, ahead = ahead, next(batches, nothing)
            self.at_end = ahead is nothing
            yield batch


class ElasticLoader(LoaderWrapper, DataLoaderStateMixin):
    """A prepared training loader whose epochs are divided among the replicas that are there.

    It fetches no batch ahead: of each batch it knows from the division whether it is the last of the epoch, and so does
    ``accumulate()``. The first iteration, and reading ``epoch``, join the others, and then begin where they are::

        for epoch in range(train_loader.epoch, epochs):
            for batch in train_loader: ...

    Args:
        loader: what counts epochs and batches.
        join: joins the other replicas, once.
    """

    def __init__(self, loader: TrainLoader, join: Callable[[], None]) -> None:
        self.loader, self._join = loader, join
        self.gradient_state = GradientState()
        self._chosen: int | None = None  # the epoch that a loop has set, until it begins

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the batches that are left of the epoch.

        Raises:
            ValueError: the loop has set another epoch than that in which the others are.
        """
        self._join()
        self._begin_epoch()
        self.begin()
        self.remainder = 0  # this job's samples all count: it gathers those of no other one
        try:
            yield from self._batches()
        finally:
            self.end()

    def _begin_epoch(self) -> None:
        chosen, self._chosen = self._chosen, None
        if chosen not in (None, self.loader.epoch):
            raise ValueError(
                f"The loop has called set_epoch({chosen}), and the other replicas are in epoch {self.loader.epoch}: "
                "begin where they are, with 'for epoch in range(train_loader.epoch, epochs)'."
            )

    def _batches(self) -> Iterator[Any]:
        for batch in self.loader:
            self.end_of_dataloader = self._is_last()
            yield batch

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, or the next epoch if that one is over; joins the other replicas."""
        self._join()
        return self.loader.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, see :meth:`TrainLoader.set_epoch`."""
        self._chosen = epoch
        self.loader.set_epoch(epoch)

    def skip_first_batches(self, num_batches: int) -> ElasticLoader:
        """Has the next iteration begin after so many batches of the epoch, and returns this loader.

        It does so already if a checkpoint was saved there: then also among another number of replicas.
        """
        if num_batches != self.loader.num_batches:
            self.loader.load_state_dict({"epoch": self.loader.epoch, "num_batches": num_batches})
        return self

    def _is_last(self) -> bool:
        inner = self.loader.loader
        return inner.at_end if isinstance(inner, Lookahead) else self.loader.num_batches >= len(self.loader)


def divided_anew(
    accelerator: Accelerator, loader: DataLoader[Any], config: Settings, seed: int, between: Callable[[], object]
) -> TrainLoader:
    """Returns what an :class:`ElasticLoader` of a job iterates over, for the user's loader.

    Args:
        accelerator: that of the job.
        loader: the user's loader.
        config: the settings of the method.
        seed: the seed of the order, the same in all jobs.
        between: called between two batches; it may raise.

    Raises:
        ValueError: a setting of the Accelerator's loaders excludes that.
    """
    _check(accelerator, config)
    place = accelerator.process_index, accelerator.num_processes * (config.num_jobs or 1)
    ordered = with_seed_of_its_own(in_elastic_order(loader, config, place, seed))
    source: Any = ordered if isinstance(sampler_of(ordered), ElasticSampler) else Lookahead(ordered)
    device = accelerator.device if accelerator.device_placement else None

    def finish(batch: Any) -> Any:
        return batch if device is None else send_to_device(batch, device, non_blocking=accelerator.non_blocking)

    return TrainLoader(source, finish, between)


def elastic_loaders(accelerator: Accelerator) -> list[TrainLoader]:
    """Returns what counts epochs and batches of the training loaders of a job that comes and goes."""
    return [loader.loader for loader in prepared_loaders(accelerator) if isinstance(loader, ElasticLoader)]


def _check(accelerator: Accelerator, config: Settings) -> None:
    excluded = {
        "split_batches": (accelerator.split_batches, False, "divides each batch among processes, whose number changes"),
        "dispatch_batches": (bool(accelerator.dispatch_batches), False, "has one process load the batches of all"),
        "even_batches": (accelerator.even_batches, True, "gives replicas different numbers of batches"),
        "use_stateful_dataloader": (
            accelerator.use_stateful_dataloader,
            False,
            "keeps a place in data that are not divided anew; save_state() keeps that of the training loader",
        ),
    }
    for name, (value, allowed, why) in excluded.items():
        if value != allowed:
            raise ValueError(
                f"lighthouse={getattr(config, 'lighthouse', None)!r} is for replicas that come and go, and "
                f"{name}={value!r} {why}: set {name}={allowed!r} in the DataLoaderConfiguration, or leave lighthouse "
                "out."
            )
