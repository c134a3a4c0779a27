"""The label-skewed split: which worker holds what, and the sampler over it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pipesync.data import LabelSkewedSampler, label_skewed_partition


def labels_held(labels: list[int], part: Tensor) -> list[int]:
    return sorted({labels[index] for index in part.tolist()})


def random_labels(num_labels: int, size: int) -> list[int]:
    return torch.randint(num_labels, (size,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize(
    ("num_replicas", "labels_per_worker", "expected"),
    [
        (2, 2, [[0, 1], [2, 3]]),
        (4, 2, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (3, 3, [[0, 1, 2], [0, 1, 3], [0, 2, 3]]),
        (2, 4, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (4, 1, [[0], [1], [2], [3]]),  # as in the paper (SelSync, IV-A)
        (5, 1, [[0], [1], [2], [3], [0]]),
    ],
)
def test_holders_of_labels(num_replicas: int, labels_per_worker: int, expected: list[list[int]]) -> None:
    """The parts are disjoint and complete, and a shared label is dealt out evenly."""
    labels = random_labels(4, 403)
    parts = label_skewed_partition(labels, num_replicas, labels_per_worker)
    assert [labels_held(labels, part) for part in parts] == expected
    assert sorted(torch.cat(parts).tolist()) == list(range(403))
    for label in range(4):
        counts = [sum(labels[index] == label for index in part.tolist()) for part in parts]
        shares = [count for count in counts if count]
        assert max(shares) - min(shares) <= 1


def test_labels_count_in_sorted_order_whatever_their_values() -> None:
    labels = [70, -3, 12, 70, -3, 12]
    parts = label_skewed_partition(torch.tensor(labels), 3, 1)
    assert [labels_held(labels, part) for part in parts] == [[-3], [12], [70]]


def test_seed_decides_who_gets_which_sample() -> None:
    first, same, other = (label_skewed_partition([0] * 100, 2, 1, seed)[0].tolist() for seed in (1, 1, 2))
    assert first == same
    assert first not in (other, list(range(50)))


def test_labels_that_nobody_holds_are_reported() -> None:
    labels = random_labels(5, 100)
    with pytest.warns(UserWarning, match=r"labels_per_worker=2 on num_replicas=2 leaves 1 of 5 labels"):
        parts = label_skewed_partition(labels, 2, 2)
    assert labels_held(labels, torch.cat(parts)) == [0, 1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        label_skewed_partition(labels, 3, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((([0, 1, 2], 2, number), f"labels_per_worker={number} .* 3") for number in (0, -1, 4)),
        (([0, 1, 1, 1], 3, 1), r"labels_per_worker=1 on num_replicas=3 leaves worker 2 without samples"),
        (([0, 1], 0, 1), "num_replicas=0"),
        (([[0], [1]], 1, 1), r"\(2, 1\)"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        label_skewed_partition(*arguments)
    with pytest.raises(ValueError, match="rank 2"):
        LabelSkewedSampler([0, 1], 1, 2, 2)


#: Labels of which worker 0 of 2 gets 40 samples and worker 1 gets 15.
UNEVEN = [0] * 40 + [1] * 15


def test_sampler_gives_all_ranks_the_largest_parts_length() -> None:
    """Nothing is left out, and nothing comes again before everything has been seen."""
    for rank, part in enumerate(label_skewed_partition(UNEVEN, 2, 1, seed=3)):
        sampler = LabelSkewedSampler(UNEVEN, 1, 2, rank, seed=3)
        assert isinstance(sampler, DistributedSampler)
        assert len(list(sampler)) == len(sampler) == 40
        times = torch.tensor(list(sampler)).bincount(minlength=55)[part]
        assert times.sum() == 40
        assert times.max() - times.min() <= 1
        batches = [batch for (batch,) in DataLoader(TensorDataset(torch.tensor(UNEVEN)), 8, sampler=sampler)]
        assert torch.cat(batches).tolist() == [rank] * 40


def test_sampler_reshuffles_in_every_epoch() -> None:
    """A short part's second round repeats the first, and another epoch repeats other samples."""
    sampler, plain = (LabelSkewedSampler(UNEVEN, 1, 2, 1, shuffle=shuffle) for shuffle in (True, False))
    orders, part = [], list(range(40, 55))
    for epoch in (0, 1, 0):
        for one in (sampler, plain):
            one.set_epoch(epoch)
        orders.append(list(sampler))
        assert list(plain) == part + part + part[:10]
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert orders[0][:15] == orders[0][15:30]
    assert set(orders[0][30:]) != set(orders[1][30:])
