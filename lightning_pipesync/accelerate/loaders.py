"""Loaders that Accelerate prepares in the order of a method's settings, which the epoch determines on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from lightning_pipesync.accelerate.private import mark_prepared, prepared_loaders
from lightning_pipesync.data import adjusted_batch_size
from lightning_pipesync.data.loaders import LoaderWrapper, num_batches, sampler_of, with_order
from lightning_pipesync.data.order import in_order, replaceable_order
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.data.work_queue import WorkQueueBatches
from lightning_pipesync.methods.settings import Settings


class EpochLoader(LoaderWrapper):
    """A prepared loader whose next iteration is the next epoch, unless ``set_epoch`` is called before.

    Accelerate counts an epoch when it ends. Otherwise one that stops early, or of which only the rest was iterated
    over, would come again.

    Args:
        loader: what Accelerate has prepared.
        inject: appends rows of other ranks to each batch.
    """

    def __init__(self, loader: Any, inject: Callable[[Any], Any] | None = None) -> None:
        self.loader, self._inject = loader, inject
        self._begun: int | None = None  # the epoch that has begun, until another one is set

    def __iter__(self) -> Iterator[Any]:
        if self._begun == self.loader.iteration:
            self.set_epoch(self.loader.iteration + 1)
        epoch = self.loader.iteration
        for batch in self.loader:
            self._begun = epoch
            if self._inject is not None:
                self.loader.remainder = 0  # the last batch has rows of others, and no sample twice
                batch = self._inject(batch)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._begun = None
        self.loader.set_epoch(epoch)

    def skip_first_batches(self, num_batches: int) -> EpochLoader:
        """Returns a loader of the epoch without its first batches; this one goes on with the epoch after."""
        self._begun = self.loader.iteration
        rest = skip_first_batches(self.loader, num_batches)
        rest.set_epoch(self._begun)
        return EpochLoader(rest, self._inject)


class SeededSampler(Sampler[Any]):
    """The user's sampler, whose generator each epoch seeds, so that its order is the same on all ranks.

    Args:
        sampler: has an attribute ``generator``. It stays as it is.
        seed: of the first epoch, the same on all ranks.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler, self.seed, self.epoch = copy(sampler), seed, 0
        self.sampler.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        self.sampler.generator.manual_seed(self.seed + self.epoch)
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def for_training(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    config: Settings,
    find_data: Callable[[], TrainingData],
    seed: int,
) -> Any:
    """Prepares the training loader in the order of the method's settings, and with data injection if it is set.

    Iterable data sets and the user's own samplers and batch samplers keep the order that Accelerate gives them, with a
    warning if ``partition="seldp"``. The ``seed`` is the same on all ranks.

    Raises:
        ValueError: a setting has no effect on this loader; with ``partition="work_queue"`` on every rank.
    """
    if config.partition == "work_queue":
        number = len(prepared_loaders(accelerator))
        ordered = find_data().prepare(loader, seed).loader
        sampler_of(ordered).ask = lambda _, *asked: find_data().ask(number, *asked)  # of the method of that time
        return _prepared(accelerator, ordered, divided_by=1)
    world_size = accelerator.num_processes
    order = None
    if config.partition == "seldp":
        # A batch sampler, or samples without batches, stay in Accelerate's order.
        rank, of_torch = accelerator.process_index, None if loader.batch_size is None else seed
        order = replaceable_order(loader, config, rank, world_size, of_torch, loader.drop_last, divided=True)
    inject = None if config.injection is None else _injecting(accelerator, find_data)
    if order is not None or inject is not None:
        loader = in_order(loader, config, order, _batch_size(accelerator, loader, config.injection))
    if order is None:
        return _prepared(accelerator, loader, world_size, seed=seed, split_batches=inject is None, inject=inject)
    prepared = _prepared(accelerator, loader, 1, inject=inject)
    prepared.batch_sampler.num_processes = world_size  # with which Accelerate counts the samples of a batch
    return prepared


def _injecting(accelerator: Accelerator, find_data: Callable[[], TrainingData]) -> Callable[[Any], Any]:
    """Returns a function that appends rows of other ranks to a batch on the host, and moves it to the device.

    ``find_data`` is called for each batch, as loading a checkpoint replaces the method's training data.
    """

    def inject(batch: Any) -> Any:
        injected = find_data().inject(batch)
        return send_to_device(injected, accelerator.device) if accelerator.device_placement else injected

    return inject


def check_even(prepared: Any) -> None:
    """Raises a ValueError if the ranks have different numbers of training batches; a collective call."""
    numbers = gather_object([num_batches(prepared)])
    if len(set(numbers)) > 1:
        raise ValueError(
            f"The ranks have {', '.join(map(str, numbers))} training batches in an epoch, and all ranks of a method "
            "must take the same number of steps: leave out even_batches=False, or set drop_last=True."
        )


def _batch_size(accelerator: Accelerator, loader: DataLoader[Any], injection: tuple[float, float] | None) -> int | None:
    """Returns the number of samples that a rank loads for a batch; None if the loader makes no batches."""
    size = loader.batch_size
    if injection is not None and (size is None or isinstance(loader.dataset, IterableDataset)):
        raise ValueError(
            f"injection={injection} needs a training loader of a map-style data set with a batch_size, and this one "
            "has an iterable data set, its own batch sampler, or no batches: set injection=None."
        )
    if size is not None and accelerator.split_batches:
        size = max(1, size // accelerator.num_processes)
    return (
        size if size is None or injection is None else adjusted_batch_size(size, *injection, accelerator.num_processes)
    )


def uses_work_queue(loader: Any) -> bool:
    return isinstance(getattr(loader, "batch_sampler", None), WorkQueueBatches)


def for_pipeline(accelerator: Accelerator, loader: DataLoader[Any], seed: int, part: int = 0, parts: int = 1) -> Any:
    """Returns the loader with the same batches in the same order on all ranks of a pipeline, which has one of parts."""
    return _prepared(accelerator, loader, divided_by=parts, part=part, seed=seed)


def check_training(config: Settings) -> None:
    """Checks, when a training begins without ``prepare_train_loader``, that no setting of the data needs it."""
    if config.injection is not None:
        raise ValueError(
            f"injection={config.injection} has no effect on loaders passed to prepare(): call train_loader = "
            "accelerator.prepare_train_loader(train_loader), or set injection=None."
        )
    if config.partition != "defdp":
        warnings.warn(
            f"partition={config.partition!r} has no effect on loaders passed to prepare(), which does not know the "
            "training loader: call train_loader = accelerator.prepare_train_loader(train_loader), or set "
            "partition='defdp'.",
            stacklevel=3,
        )


def _prepared(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    divided_by: int,
    *,
    seed: int | None = None,
    split_batches: bool = True,
    part: int | None = None,
    inject: Callable[[Any], Any] | None = None,
) -> Any:
    """Prepares a loader as Accelerate does, divided among ``divided_by`` ranks; ``part`` is another one than the rank.

    ``inject`` is called on each batch, which is on the host then.

    It draws no global random numbers, so that a run that resumes within an epoch draws as many as an uninterrupted one.
    """
    order = sampler_of(loader)
    if seed is not None and not isinstance(order, RandomSampler) and hasattr(order, "generator"):
        loader = with_order(loader, SeededSampler(order, _seed_of(order, seed)))
    generator = loader.generator
    whole = divided_by == 1
    own = accelerator.process_index if part is None else part
    loader.generator = generator or torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=divided_by,
        process_index=0 if whole else own,
        split_batches=accelerator.split_batches and split_batches and not whole,
        put_on_device=accelerator.device_placement and inject is None,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False if whole or part is not None else accelerator.dispatch_batches,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler or seed is not None,
        data_seed=accelerator.dataloader_config.data_seed if seed is None else seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    loader.generator = generator
    if not isinstance(order, WorkQueueBatches):  # which counts its epochs itself
        prepared = EpochLoader(prepared, inject)
    mark_prepared(prepared)
    prepared_loaders(accelerator).append(prepared)
    return prepared


def _seed_of(sampler: Any, seed: int) -> int:
    """Returns the seed of the user's own generator, rank 0's on all ranks; without one, ``seed``."""
    own = sampler.generator.initial_seed() if isinstance(sampler.generator, torch.Generator) else seed
    return int(broadcast_object_list([own])[0])


def shared_seed(accelerator: Accelerator) -> int:
    """Returns the seed of the data's order, the same on all ranks: the configured one, or rank 0's."""
    configured = accelerator.dataloader_config.data_seed
    [seed] = broadcast_object_list([torch.initial_seed() % 2**31 if configured is None else configured])
    return int(seed)
