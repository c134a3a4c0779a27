"""The label-skewed split: which worker holds what, and the sampler over it."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pipesync.data import LabelSkewedSampler, label_skewed_partition


def labels_held(labels, part):
    return sorted({labels[index] for index in part.tolist()})


def random_labels(num_labels, size, seed=0):
    return torch.randint(num_labels, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_paper_split_of_cifar10():
    """SelSync IV-A: ten workers with one label each."""
    labels = random_labels(10, 500)
    parts = label_skewed_partition(labels, 10, 1)
    for worker, part in enumerate(parts):
        assert part.tolist() == [index for index, label in enumerate(labels) if label == worker]


@pytest.mark.parametrize(
    ("num_replicas", "labels_per_worker", "expected"),
    [
        (2, 2, [[0, 1], [2, 3]]),
        (4, 2, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (3, 3, [[0, 1, 2], [0, 1, 3], [0, 2, 3]]),
        (2, 4, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (5, 1, [[0], [1], [2], [3], [0]]),
    ],
)
def test_holders_of_labels(num_replicas, labels_per_worker, expected):
    labels = random_labels(4, 403)
    parts = label_skewed_partition(labels, num_replicas, labels_per_worker)
    assert [labels_held(labels, part) for part in parts] == expected
    # Disjoint and complete.
    assert sorted(torch.cat(parts).tolist()) == list(range(403))
    # A shared label is dealt out evenly.
    for label in range(4):
        counts = [sum(labels[index] == label for index in part.tolist()) for part in parts]
        shares = [count for count in counts if count]
        assert max(shares) - min(shares) <= 1


def test_labels_count_in_sorted_order_whatever_their_values():
    labels = [70, -3, 12, 70, -3, 12]
    parts = label_skewed_partition(torch.tensor(labels), 3, 1)
    assert [labels_held(labels, part) for part in parts] == [[-3], [12], [70]]


def test_seed_decides_who_gets_which_sample():
    labels = [0] * 100

    def first_part(seed):
        return label_skewed_partition(labels, 2, 1, seed)[0].tolist()

    assert first_part(1) == first_part(1)
    assert first_part(1) != first_part(2)
    assert first_part(1) != list(range(50))


def test_labels_that_nobody_holds_are_reported():
    labels = random_labels(5, 100)
    with pytest.warns(UserWarning, match=r"labels_per_worker=2 on num_replicas=2 leaves 1 of 5 labels"):
        parts = label_skewed_partition(labels, 2, 2)
    assert labels_held(labels, torch.cat(parts)) == [0, 1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        label_skewed_partition(labels, 3, 2)


@pytest.mark.parametrize("labels_per_worker", [0, -1, 4])
def test_labels_per_worker_out_of_range(labels_per_worker):
    with pytest.raises(ValueError, match=f"labels_per_worker={labels_per_worker} .* 3"):
        label_skewed_partition([0, 1, 2], 2, labels_per_worker)


def test_worker_without_samples():
    with pytest.raises(ValueError, match=r"labels_per_worker=1 on num_replicas=3 leaves worker 2 without samples"):
        label_skewed_partition([0, 1, 1, 1], 3, 1)


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="num_replicas=0"):
        label_skewed_partition([0, 1], 0, 1)
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        label_skewed_partition([[0], [1]], 1, 1)
    with pytest.raises(ValueError, match="rank 2"):
        LabelSkewedSampler([0, 1], 1, 2, 2)


@pytest.fixture
def uneven():
    """Labels of which worker 0 of 2 gets 40 samples and worker 1 gets 15."""
    return [0] * 40 + [1] * 15


def test_sampler_gives_all_ranks_the_largest_part_s_length(uneven):
    parts = label_skewed_partition(uneven, 2, 1, seed=3)
    for rank, part in enumerate(parts):
        sampler = LabelSkewedSampler(uneven, 1, 2, rank, seed=3)
        assert isinstance(sampler, DistributedSampler)
        indices = list(sampler)
        assert len(indices) == len(sampler) == 40
        # Nothing is left out, and nothing comes again before everything has been seen.
        times = torch.tensor(indices).bincount(minlength=55)[part]
        assert times.sum() == 40
        assert times.max() - times.min() <= 1


def test_sampler_reshuffles_in_every_epoch(uneven):
    sampler = LabelSkewedSampler(uneven, 1, 2, 1)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    # A short part's second round repeats the first, and another epoch repeats other samples.
    assert orders[0][:15] == orders[0][15:30]
    assert set(orders[0][30:]) != set(orders[1][30:])


def test_sampler_without_shuffle(uneven):
    sampler = LabelSkewedSampler(uneven, 1, 2, 1, shuffle=False)
    part = list(range(40, 55))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == part + part + part[:10]


def test_sampler_in_a_data_loader(uneven):
    dataset = TensorDataset(torch.tensor(uneven))
    loaders = [DataLoader(dataset, 8, sampler=LabelSkewedSampler(uneven, 1, 2, rank)) for rank in range(2)]
    for rank, loader in enumerate(loaders):
        batches = [batch for (batch,) in loader]
        assert len(batches) == 5
        assert torch.cat(batches).tolist() == [rank] * 40
