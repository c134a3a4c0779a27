"""The batches of a training loop, epoch by epoch: which epoch, how many, and where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

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


def test_a_stream_has_batches_of_another_size_too() -> None:
    loader = DataLoader(Stream(), 8)
    assert [len(batch) for batch in with_order(loader, loader.sampler, 5)] == [5, 5, 2]
    assert [len(batch) for batch in loader] == [8, 4]
