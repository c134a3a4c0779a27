"""The batches of a training loop, epoch by epoch: their order, which epoch, and where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_pipesync.data import SelDPSampler, TrainLoader
from lightning_pipesync.data.loaders import with_order

DATA = list(range(24))


class Own(Sampler[int]):
    """An order that this package does not know."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % 12 for i in range(12)])

    def __len__(self) -> int:
        return 12


class Stream(IterableDataset[int]):
    """Counts on from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 12))


def loader_of(kind: str, num_workers: int = 0) -> TrainLoader:
    if kind == "stream":
        loader = DataLoader(Stream(), 5, num_workers=num_workers)
    else:
        sampler = {"seldp": SelDPSampler, "ddp": DistributedSampler}[kind](DATA, 2, 1) if kind != "own" else Own()
        loader = DataLoader(DATA, 5, sampler=sampler, num_workers=num_workers)
    return TrainLoader(loader, Tensor.tolist)


@pytest.mark.parametrize("kind", ["seldp", "ddp", "own", "stream"])
def test_each_iteration_is_the_next_epoch_or_the_one_that_was_set(kind: str) -> None:
    told, untold = loader_of(kind), loader_of(kind)
    epochs = []
    for epoch in range(4):
        told.set_epoch(epoch)
        epochs.append(list(told))
        assert list(untold) == epochs[epoch]
    assert len({str(batches) for batches in epochs}) > 1
    assert {len(batches) for batches in epochs} == {3}
    told.set_epoch(1)
    assert list(told) == epochs[1]
    assert told.epoch == 2
    assert next(iter(told)) == epochs[2][0]
    assert list(told) == epochs[3], "one that was left early is over"
    if kind != "stream":
        assert len(told) == 3


@pytest.mark.parametrize(("kind", "num_workers"), [("seldp", 0), ("seldp", 1), ("ddp", 0), ("own", 0), ("stream", 0)])
@pytest.mark.parametrize("num_batches", [0, 2, 3])
def test_a_resumed_run_goes_on_after_the_last_batch(kind: str, num_workers: int, num_batches: int) -> None:
    """Whatever the workers have fetched ahead."""
    whole = loader_of(kind)
    expected = [list(whole) for _ in range(3)]
    stopped, resumed = loader_of(kind, num_workers), loader_of(kind, num_workers)
    list(stopped)
    batches = iter(stopped)
    assert [next(batches) for _ in range(num_batches)] == expected[1][:num_batches]
    assert stopped.state_dict() == {"epoch": 1, "num_batches": num_batches}
    resumed.load_state_dict(stopped.state_dict())
    resumed.set_epoch(resumed.epoch)  # as a loop does; it changes nothing
    assert list(resumed) == expected[1][num_batches:]
    assert list(resumed) == expected[2]
    resumed.load_state_dict(stopped.state_dict())
    resumed.set_epoch(2)
    assert list(resumed) == expected[2], "another epoch is whole"
    resumed.set_epoch(1)
    assert list(resumed) == expected[1], "and so is that one, when it is iterated over anew"


# --- another order ----------------------------------------------------------------------------------------------------


class DataLoaderOf(DataLoader):
    """A subclass with an argument that it does not keep."""

    def __init__(self, what: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class PairSampler(Sampler[list[int]]):
    """A batch sampler with arguments of its own: pairs of samples, and the last one alone."""

    def __init__(self, order: Any) -> None:
        self.sampler, self.batch_size = order, 2

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        return iter([indices[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size)])

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)


@pytest.mark.parametrize("num_samples", [None, 3])
def test_a_loader_of_any_class_gets_another_order(num_samples: int | None) -> None:
    """A copy: the class is the user's, whose loader and batch sampler stay as they are."""
    order, data = [7, 2, 5, 0, 3, 1, 6, 4], list(range(8))
    loaders: list[DataLoader[Any]] = [
        DataLoaderOf("rows", data, batch_size=2),
        DataLoaderOf("rows", data, batch_size=2, num_workers=1, persistent_workers=True),
        DataLoader(data, batch_sampler=PairSampler(data)),
        DataLoader(data, batch_sampler=BatchSampler(data, 2, drop_last=False)),
    ]
    for loader in loaders:
        before = [batch.tolist() for batch in loader]
        ordered = with_order(loader, order, num_samples)
        assert type(ordered) is type(loader)
        size = num_samples or 2
        assert [batch.tolist() for batch in ordered] == [order[i : i + size] for i in range(0, 8, size)]
        assert [batch.tolist() for batch in loader] == before == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_batches_of_another_size_and_a_batch_sampler_without_a_sampler() -> None:
    loader = DataLoader(Stream(), 8)
    assert [len(batch) for batch in with_order(loader, loader.sampler, 5)] == [5, 5, 2]
    assert [len(batch) for batch in loader] == [8, 4]
    with pytest.raises(ValueError, match=r"\(list\) has no attribute 'sampler'"):
        with_order(DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), DATA)
