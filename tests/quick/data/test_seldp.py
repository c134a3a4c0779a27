"""SelDP: the order of Fig. 7b, lengths, resuming within an epoch, use in a DataLoader."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pipesync.data import SelDPSampler
from tests.references.training_data import queues


def epochs(sampler: SelDPSampler, numbers: Iterable[int]) -> list[list[int]]:
    rounds = []
    for epoch in numbers:
        sampler.set_epoch(epoch)
        rounds.append(list(sampler))
    return rounds


# Fig. 7b and its analogues: which chunk (A, B, C, D) each rank holds in each epoch.
FIG_7B = {1: ["A"], 2: ["AB", "BA"], 3: ["ABC", "BCA", "CAB"], 4: ["ABCD", "BCDA", "CDAB", "DABC"]}


@pytest.mark.parametrize("world_size", FIG_7B)
def test_order_is_fig_7b(world_size: int) -> None:
    """Shuffled once, equally on all ranks, it is the simulation's."""
    chunks = {"A": [0, 1, 2], "B": [3, 4, 5], "C": [6, 7, 8], "D": [9, 10, 11]}
    dataset: Any = range(3 * world_size)
    for rank, queue in enumerate(FIG_7B[world_size]):
        expected = [chunks[name] for name in queue]
        sampler = SelDPSampler(dataset, world_size, rank, shuffle=False)
        assert epochs(sampler, range(2 * world_size)) == expected * 2, "the queue is circular"
        full = SelDPSampler(dataset, world_size, rank, shuffle=False, full_pass=True)
        assert epochs(full, range(2)) == [list(chain(*expected))] * 2
        for full_pass in (False, True):
            shuffled = SelDPSampler(dataset, world_size, rank, full_pass=full_pass)
            of_epochs = [queues(len(dataset), world_size, epoch, "seldp", full_pass)[rank] for epoch in range(5)]
            assert epochs(shuffled, range(5)) == of_epochs
    assert list(SelDPSampler(dataset, 1, 0, seed=6)) != list(SelDPSampler(dataset, 1, 0, seed=5))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [7, 8, 14, 25, 63])
def test_each_rank_sees_every_sample_in_world_size_epochs(world_size: int, size: int, drop_last: bool) -> None:
    """In epochs as long as those of a DistributedSampler; no sample is on two ranks at the same step."""
    left_out = size % world_size if drop_last else 0
    padding = -size % world_size if not drop_last else 0
    dataset: Any = range(size)
    of_ranks = []
    for rank in range(world_size):
        expected = len(list(DistributedSampler(dataset, world_size, rank, drop_last=drop_last)))
        sampler = SelDPSampler(dataset, world_size, rank, drop_last=drop_last)
        full = SelDPSampler(dataset, world_size, rank, drop_last=drop_last, full_pass=True)
        rounds = epochs(sampler, range(world_size))
        assert {len(sampler), *map(len, rounds)} == {expected}
        assert len(full) == world_size * expected
        assert list(full) == list(chain(*rounds))
        seen = torch.tensor(list(full)).bincount(minlength=size)
        assert [(seen == times).sum() for times in range(3)] == [left_out, size - left_out - padding, padding]
        of_ranks.append(full)
    if not padding:
        assert all(len(set(step)) == world_size for step in zip(*of_ranks, strict=True))


@pytest.mark.parametrize("full_pass", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 5, 7])
def test_start_skips_within_its_epoch_only(full_pass: bool, samples: int) -> None:
    def sampler(**kwargs: Any) -> SelDPSampler:
        return SelDPSampler(range(20), 3, 1, full_pass=full_pass, **kwargs)  # type: ignore[arg-type]

    uninterrupted = epochs(sampler(), range(5))
    resumed = sampler(start=(2, samples))
    assert resumed.epoch == 2
    assert list(resumed) == uninterrupted[2][samples:]
    assert len(resumed) == len(uninterrupted[2])
    assert list(resumed) == uninterrupted[2], "once it was used, every iteration is whole"
    assert epochs(resumed, range(5)) == uninterrupted
    expected = [*uninterrupted[:2], uninterrupted[2][samples:], *uninterrupted[3:]]
    assert epochs(sampler(start=(2, samples)), range(5)) == expected


@pytest.mark.parametrize("full_pass", [False, True])
@pytest.mark.parametrize(("rounds", "samples"), [(1, 0), (1, 3), (4, 6)])
def test_start_may_be_in_a_later_round_of_an_epoch(rounds: int, samples: int, full_pass: bool) -> None:
    """What was used up is empty at first, and begins anew where it was when it is cycled."""
    length, dataset = 21 if full_pass else 7, range(20)
    whole = list(SelDPSampler(dataset, 3, 1, full_pass=full_pass, start=(1, 0)))  # type: ignore[arg-type]
    sampler = SelDPSampler(dataset, 3, 1, full_pass=full_pass, start=(1, rounds * length + samples))  # type: ignore[arg-type]
    assert [list(sampler) for _ in range(3)] == [[], whole[samples:], whole]


@pytest.mark.parametrize("used", [1, 2, 5])
def test_the_queue_goes_on_where_an_epoch_was_cut_short(used: int) -> None:
    """Each rank's first `used` samples an epoch, one after the other, are its queue."""
    for rank in range(2):
        whole = list(SelDPSampler(range(12), 2, rank, full_pass=True))  # type: ignore[arg-type]
        sampler = SelDPSampler(range(12), 2, rank, samples_per_epoch=used)  # type: ignore[arg-type]
        seen = [index for epoch in epochs(sampler, range(12)) for index in epoch[:used]]
        assert seen == [whole[i % 12] for i in range(12 * used)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_data_loader(num_workers: int) -> None:
    dataset = TensorDataset(torch.arange(22) * 10)
    sampler, reference = (SelDPSampler(dataset, 2, 1, start=(0, 4)) for _ in range(2))
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        [expected] = epochs(reference, [epoch])
        batches = [batch.tolist() for (batch,) in loader]
        assert batches == [batch.tolist() for batch in (torch.tensor(expected) * 10).split(4)]
        assert len(batches) == (2 if epoch == 0 else 3)
    assert len(loader) == 3


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ((range(20), 2, 0), {"start": (-1, 0)}, "start="),
        ((range(20), 2, 0), {"start": (0, -1)}, "start="),
        ((range(20), 2, -1), {}, "rank -1"),
        ((range(20), 2, 2), {}, "rank 2"),
        ((range(3), 4, 0), {}, r"3 samples .* num_replicas=4.*fewer ranks"),
        ((range(3), 4, 0), {"drop_last": True}, r"3 samples .* num_replicas=4.*fewer ranks"),
        ((range(12), 2, 0), {"samples_per_epoch": 0}, "samples_per_epoch"),
        ((range(12), 2, 0), {"samples_per_epoch": 7}, "samples_per_epoch"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[Any, ...], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SelDPSampler(*arguments, **settings)
