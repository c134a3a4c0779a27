"""The training loader in a Trainer: the order of the data, and what is left as the user made it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, WeightedRandomSampler

from lightning_pipesync import SelDPSampler, SelSyncStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import (
    LOCAL,
    SAMPLES,
    Classifier,
    batches,
    dataset,
    fit,
    train_loader,
    trainer,
    val_loader,
)


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


class Stream(IterableDataset):
    """Hands each rank samples of its own."""

    def __iter__(self) -> Any:
        data = dataset()
        return iter([data[i] for i in range(int(os.environ["RANK"]), SAMPLES, 2)])


class PairSampler(BatchSampler):
    """A batch sampler of the user's own: it hands out pairs, whatever the batch size."""

    def __iter__(self) -> Any:
        indices = list(self.sampler)
        return iter([indices[i : i + 2] for i in range(0, len(indices), 2)])

    def __len__(self) -> int:
        return len(self.sampler) // 2


def in_pairs(data: Any) -> DataLoader:
    return DataLoader(data, batch_sampler=PairSampler(SequentialSampler(data), 2, False))


def sampled(make: Callable[[Any], Any]) -> DataLoader:
    data = dataset()
    return DataLoader(data, batch_size=4, sampler=make(data))


MAKE: dict[str, Callable[[], DataLoader]] = {
    "plain": lambda: DataLoader(dataset(), batch_size=4),
    "sampler": lambda: sampled(lambda _: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "batch sampler": lambda: in_pairs(dataset()),
    "own SelDP": lambda: sampled(lambda data: SelDPSampler(data, 2, int(os.environ["RANK"]), shuffle=False)),
    "no batches": lambda: DataLoader(batches(), batch_size=None),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
}
#: The loader, arguments of the Trainer, the samplers that are used in the end, and the first batch of rank 0.
LOADERS: list[tuple[str, dict[str, Any], str, str, list[int] | None]] = [
    ("plain", {}, "SelDPSampler", "BatchSampler", None),
    ("plain", {"use_distributed_sampler": False}, "SequentialSampler", "BatchSampler", [0, 1, 2, 3]),
    ("plain", {"overfit_batches": 2}, "DistributedSampler", "BatchSampler", None),
    ("sampler", {}, "DistributedSamplerWrapper", "BatchSampler", None),
    ("batch sampler", {}, "SelDPSampler", "PairSampler", None),
    ("own SelDP", {}, "SelDPSampler", "BatchSampler", [0, 1, 2, 3]),
    ("no batches", {}, "SelDPSampler", "NoneType", None),
    ("iterable", {}, "_InfiniteConstantSampler", "BatchSampler", [0, 2, 4, 6]),
]


def fit_loader(folder: Path, kind: str, **how: Any) -> tuple[list[Any], str, str]:
    model = Classifier()
    run = trainer(SelSyncStrategy(**LOCAL), 2, folder, max_epochs=1, **how)
    run.fit(model, MAKE[kind]())
    used = run.train_dataloader
    sampler = getattr(used.batch_sampler, "sampler", used.sampler)
    return model.seen, type(sampler).__name__, type(used.batch_sampler).__name__


class Validating(Classifier):
    """It records what it validates on, and whether as a sanity check."""

    def __init__(self) -> None:
        super().__init__()
        self.validated_on: list[tuple[bool, list[int]]] = []

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.validated_on.append((self.trainer.sanity_checking, batch[0].tolist()))


def fit_validating(folder: Path) -> tuple[list[Any], list[int], str]:
    model = Validating()
    strategy = SelSyncStrategy(**LOCAL, injection=(1.0, 0.5))  # type: ignore[arg-type]
    run = trainer(strategy, 2, folder, num_sanity_val_steps=1, max_epochs=1)
    run.fit(model, train_loader(batch_size=8), val_loader())
    return model.validated_on, [len(batch) for batch in model.seen], type(run.val_dataloaders.sampler).__name__


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {"validating": partial(fit_validating, folder)}
    for limit in (2, 0.25):
        cases["limit", limit] = partial(fit, folder, LOCAL, max_epochs=8, limit_train_batches=limit)
    for kind, how, *_ in LOADERS:
        cases[kind, str(how)] = partial(fit_loader, folder, kind, **how)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("limit", [2, 0.25])
def test_a_limit_on_batches_leaves_nothing_out_for_ever(limit: float, trained: Outcomes) -> None:
    """2 of 8 batches an epoch: the queue goes on where the epoch ended, and 8 epochs cover the data set."""
    outcomes = trained["limit", limit]
    for outcome in outcomes:
        assert len(outcome["seen"]) == 16
        assert sorted(joined(outcome["seen"])) == list(range(SAMPLES))
    for step in range(16):
        assert not set(outcomes[0]["seen"][step]) & set(outcomes[1]["seen"][step])


@pytest.mark.parametrize(("kind", "how", "sampler", "batch_sampler", "first"), LOADERS)
def test_loaders_are_respected(
    kind: str, how: dict[str, Any], sampler: str, batch_sampler: str, first: list[int] | None, trained: Outcomes
) -> None:
    seen, used_sampler, used_batch_sampler = trained[kind, str(how)][0]
    assert (used_sampler, used_batch_sampler) == (sampler, batch_sampler)
    assert first is None or seen[0] == first
    if kind == "batch sampler":
        assert {len(batch) for batch in seen} == {2}


def test_only_training_is_touched(trained: Outcomes) -> None:
    """Validation, the sanity check before training too, has Lightning's order and the user's batches, uninjected."""
    for rank, (validated_on, trained_on, sampler) in enumerate(trained["validating"]):
        shard = list(range(rank, SAMPLES, 2))
        assert validated_on == [(True, shard[:16]), (False, shard[:16]), (False, shard[16:])]
        assert sampler == "DistributedSampler"
        assert trained_on == [4 + 2] * 8
