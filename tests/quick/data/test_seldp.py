"""SelDP: the order of Fig. 7b, lengths, resuming within an epoch, use in a DataLoader."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pipesync.data import SelDPSampler


def epochs(sampler, count):
    """The sampler's indices in epochs 0 to count - 1."""
    rounds = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        rounds.append(list(sampler))
    return rounds


# Fig. 7b and its analogues: which chunk (A, B, C, D) each rank holds in each epoch.
FIG_7B = {1: ["A"], 2: ["AB", "BA"], 3: ["ABC", "BCA", "CAB"], 4: ["ABCD", "BCDA", "CDAB", "DABC"]}


@pytest.mark.parametrize(("world_size", "queues"), FIG_7B.items())
def test_order_is_fig_7b(world_size, queues):
    chunks = {"A": [0, 1, 2], "B": [3, 4, 5], "C": [6, 7, 8], "D": [9, 10, 11]}
    dataset = range(3 * world_size)
    for rank, queue in enumerate(queues):
        expected = [chunks[name] for name in queue]
        sampler = SelDPSampler(dataset, world_size, rank, shuffle=False)
        assert epochs(sampler, world_size) == expected
        # The queue is circular.
        assert epochs(sampler, 2 * world_size)[world_size:] == expected
        full = SelDPSampler(dataset, world_size, rank, shuffle=False, full_pass=True)
        assert epochs(full, 2) == [list(chain(*expected))] * 2


@pytest.mark.parametrize(
    ("drop_last", "chunks"),
    [(False, [[0, 1, 2], [3, 4, 5], [6, 0, 1]]), (True, [[0, 1], [2, 3], [4, 5]])],
)
def test_every_rank_cuts_the_same_chunks_when_lengths_do_not_divide(drop_last, chunks):
    for rank in range(3):
        queue = chunks[rank:] + chunks[:rank]
        sampler = SelDPSampler(range(7), 3, rank, shuffle=False, drop_last=drop_last)
        assert epochs(sampler, 3) == queue
        full = SelDPSampler(range(7), 3, rank, shuffle=False, drop_last=drop_last, full_pass=True)
        assert list(full) == list(chain(*queue))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shuffles_once_and_equally_on_all_ranks(world_size):
    dataset = range(60)
    whole = list(SelDPSampler(dataset, 1, 0, seed=5))
    assert whole != list(dataset)
    assert sorted(whole) == list(dataset)
    size = 60 // world_size
    for rank in range(world_size):
        for epoch, chunk in enumerate(epochs(SelDPSampler(dataset, world_size, rank, seed=5), 2 * world_size)):
            head = (rank + epoch) % world_size * size
            assert chunk == whole[head : head + size]
    assert list(SelDPSampler(dataset, 1, 0, seed=6)) != whole


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [4, 7, 12, 25])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_rank_sees_every_sample_in_world_size_epochs(world_size, size, drop_last):
    left_out = size % world_size if drop_last else 0
    padding = -size % world_size if not drop_last else 0
    for rank in range(world_size):
        rounds = epochs(SelDPSampler(range(size), world_size, rank, drop_last=drop_last), world_size)
        seen = torch.tensor(list(chain(*rounds))).bincount(minlength=size)
        assert (seen == 0).sum() == left_out
        assert (seen == 2).sum() == padding
        assert seen.max() <= 2


@pytest.mark.parametrize("full_pass", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_never_hold_the_same_sample_at_the_same_step(world_size, full_pass):
    samplers = [SelDPSampler(range(24), world_size, rank, full_pass=full_pass) for rank in range(world_size)]
    for epoch in range(world_size):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for step in zip(*samplers, strict=True):
            assert len(set(step)) == world_size


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [7, 8, 9, 13, 14, 63, 100])
def test_lengths_are_those_of_distributed_sampler(size, world_size, drop_last):
    dataset = range(size)
    for rank in range(world_size):
        expected = len(list(DistributedSampler(dataset, world_size, rank, drop_last=drop_last)))
        sampler = SelDPSampler(dataset, world_size, rank, drop_last=drop_last)
        full = SelDPSampler(dataset, world_size, rank, drop_last=drop_last, full_pass=True)
        assert len(sampler) == len(list(sampler)) == expected
        assert len(full) == len(list(full)) == world_size * expected


@pytest.mark.parametrize("full_pass", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 5, 7])
def test_start_skips_within_its_epoch_only(full_pass, samples):
    def sampler(**kwargs):
        return SelDPSampler(range(20), 3, 1, full_pass=full_pass, **kwargs)

    uninterrupted = epochs(sampler(), 5)
    resumed = sampler(start=(2, samples))
    assert resumed.epoch == 2
    assert list(resumed) == uninterrupted[2][samples:]
    assert len(resumed) == len(uninterrupted[2])
    assert list(resumed) == uninterrupted[2], "once it was used, every iteration is whole"
    assert epochs(resumed, 5) == uninterrupted
    expected = [*uninterrupted[:2], uninterrupted[2][samples:], *uninterrupted[3:]]
    assert epochs(sampler(start=(2, samples)), 5) == expected


@pytest.mark.parametrize("full_pass", [False, True])
@pytest.mark.parametrize(("rounds", "samples"), [(1, 0), (1, 3), (2, 0), (4, 6)])
def test_start_may_be_in_a_later_round_of_an_epoch(rounds, samples, full_pass):
    """What was used up is empty at first, and begins anew where it was when it is cycled."""
    length = 21 if full_pass else 7
    whole = list(SelDPSampler(range(20), 3, 1, full_pass=full_pass, start=(1, 0)))
    sampler = SelDPSampler(range(20), 3, 1, full_pass=full_pass, start=(1, rounds * length + samples))
    assert [list(sampler) for _ in range(3)] == [[], whole[samples:], whole]


@pytest.mark.parametrize("start", [(-1, 0), (0, -1)])
def test_negative_start_is_refused(start):
    with pytest.raises(ValueError, match="start="):
        SelDPSampler(range(20), 2, 0, start=start)


@pytest.mark.parametrize("rank", [-1, 2])
def test_bad_rank_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank}"):
        SelDPSampler(range(20), 2, rank)


@pytest.mark.parametrize("drop_last", [False, True])
def test_too_few_samples_are_refused(drop_last):
    with pytest.raises(ValueError, match=r"3 samples .* num_replicas=4.*fewer ranks"):
        SelDPSampler(range(3), 4, 0, drop_last=drop_last)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_data_loader(num_workers):
    dataset = TensorDataset(torch.arange(22) * 10)
    sampler = SelDPSampler(dataset, 2, 1, start=(0, 4))
    reference = SelDPSampler(dataset, 2, 1, start=(0, 4))
    persistent = num_workers > 0
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=num_workers, persistent_workers=persistent)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        reference.set_epoch(epoch)
        expected = (torch.tensor(list(reference)) * 10).split(4)
        batches = [batch for (batch,) in loader]
        assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in expected]
        assert len(batches) == (2 if epoch == 0 else 3)
    assert len(loader) == 3


@pytest.mark.parametrize("used", [1, 2, 5])
def test_the_queue_goes_on_where_an_epoch_was_cut_short(used: int) -> None:
    """Each rank's first `used` samples an epoch, one after the other, are its queue."""
    whole = [list(SelDPSampler(range(12), 2, rank, full_pass=True)) for rank in range(2)]
    for rank in range(2):
        sampler = SelDPSampler(range(12), 2, rank, samples_per_epoch=used)
        seen = []
        for epoch in range(12):
            sampler.set_epoch(epoch)
            seen += list(sampler)[:used]
        assert seen == [whole[rank][i % 12] for i in range(12 * used)]


@pytest.mark.parametrize("used", [0, 7])
def test_samples_per_epoch_out_of_range(used: int) -> None:
    with pytest.raises(ValueError, match="samples_per_epoch"):
        SelDPSampler(range(12), 2, 0, samples_per_epoch=used)
