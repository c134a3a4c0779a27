"""The training loader: the order of the data, the size of a batch, and what is left as the user made it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, WeightedRandomSampler

from lightning_pipesync import SelDPSampler, SelSyncStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised
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


def fit_loader(directory: Path, kind: str, settings: dict[str, Any], **kwargs: Any) -> tuple[list[Any], str, str]:
    data = dataset()
    if kind == "iterable":
        loader = DataLoader(Stream(), batch_size=4)
    elif kind == "sampler":
        loader = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    elif kind == "batch sampler":
        loader = DataLoader(data, batch_sampler=PairSampler(torch.utils.data.SequentialSampler(data), 2, False))
    elif kind == "own SelDP":
        rank = int(os.environ["RANK"])
        loader = DataLoader(data, batch_size=4, sampler=SelDPSampler(data, 2, rank, shuffle=False))
    elif kind == "no batches":
        loader = DataLoader(batches(), batch_size=None)
    else:
        loader = DataLoader(data, batch_size=4)
    model = Classifier()
    run = trainer(SelSyncStrategy(**settings), 2, directory, max_epochs=1, **kwargs)
    run.fit(model, loader)
    used = run.train_dataloader
    sampler = getattr(used.batch_sampler, "sampler", used.sampler)
    return model.seen, type(sampler).__name__, type(used.batch_sampler).__name__


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
#: What is said of loaders that cannot be used.
REFUSED = {
    "few samples": ["1 samples", "2 ranks"],
    "injection without batches": ["injection=", "batch_size=None"],
}


def fit_refused(directory: Path, kind: str) -> tuple[str, str] | None:
    data: Any = Subset(dataset(), [0])
    loader = {
        "few samples": lambda: DataLoader(
            data, batch_sampler=PairSampler(torch.utils.data.SequentialSampler(data), 2, False)
        ),
        "injection without batches": lambda: DataLoader(batches(), batch_size=None),
    }[kind]()
    injection = (0.5, 0.5) if kind == "injection without batches" else None
    run = trainer(SelSyncStrategy(injection=injection), 2, directory)
    return raised(lambda: run.fit(Classifier(), loader))


class Validating(Classifier):
    """It records what it validates on, and whether as a sanity check."""

    def __init__(self) -> None:
        super().__init__()
        self.validated_on: list[tuple[bool, list[int]]] = []

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.validated_on.append((self.trainer.sanity_checking, batch[0].tolist()))


def fit_validating(directory: Path) -> tuple[list[Any], list[int], str]:
    model = Validating()
    settings = {**LOCAL, "injection": (1.0, 0.5)}
    run = trainer(SelSyncStrategy(**settings), 2, directory, num_sanity_val_steps=1, max_epochs=1)
    run.fit(model, train_loader(batch_size=8), val_loader())
    return model.validated_on, [len(batch) for batch in model.seen], type(run.val_dataloaders.sampler).__name__


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    of_fives = {"batch_size": 5, "drop_last": True}
    cases: dict[Any, Any] = {
        "order": partial(fit, folder, LOCAL, max_epochs=2),
        "full pass": partial(fit, folder, {**LOCAL, "full_pass": True}, max_epochs=1),
        "drop last": partial(fit, folder, LOCAL, loader=of_fives, max_epochs=3),
        "validating": partial(fit_validating, folder),
    }
    for limit in (2, 0.25):
        cases["limit", limit] = partial(fit, folder, LOCAL, max_epochs=8, limit_train_batches=limit)
    for kind, kwargs, *_ in LOADERS:
        cases[kind, str(kwargs)] = partial(fit_loader, folder, kind, LOCAL, **kwargs)
    for kind in REFUSED:
        cases[kind] = partial(fit_refused, folder, kind)
    return launch_cases(cases, 2, init=False)


@pytest.fixture(scope="module")
def trained_by_four(folder: Path) -> Outcomes:
    cases = {
        "order": partial(fit, folder, LOCAL, max_epochs=4),
        "injection": partial(fit, folder, {**LOCAL, "injection": (0.5, 0.5)}, loader={"batch_size": 8}, max_epochs=2),
    }
    return launch_cases(cases, 4, init=False)


@pytest.mark.parametrize("ranks", ["trained", "trained_by_four"])
def test_seldp_order(ranks: str, request: pytest.FixtureRequest) -> None:
    """Fig. 7b: rank r trains chunks r, r+1, ...; as many steps as DDP; no sample twice in a step."""
    outcomes = request.getfixturevalue(ranks)["order"]
    world_size = len(outcomes)
    steps_per_epoch = SAMPLES // world_size // 4
    chunks: dict[int, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        assert outcome["steps"] == steps_per_epoch * world_size
        seen = outcome["seen"]
        assert sorted(joined(seen)) == list(range(SAMPLES))
        for epoch in range(world_size):
            chunk = joined(seen[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch])
            assert chunks.setdefault((rank + epoch) % world_size, chunk) == chunk
    for step in range(steps_per_epoch * world_size):
        together = joined(outcome["seen"][step] for outcome in outcomes)
        assert len(set(together)) == len(together)


def test_full_pass(trained: Outcomes) -> None:
    for outcome in trained["full pass"]:
        assert sorted(joined(outcome["seen"])) == list(range(SAMPLES))


@pytest.mark.parametrize("limit", [2, 0.25])
def test_a_limit_on_batches_leaves_nothing_out_for_ever(limit: float, trained: Outcomes) -> None:
    """2 of 8 batches an epoch: the queue goes on where the epoch ended, and 8 epochs cover the data set."""
    outcomes = trained["limit", limit]
    for outcome in outcomes:
        assert len(outcome["seen"]) == 16
        assert sorted(joined(outcome["seen"])) == list(range(SAMPLES))
    for step in range(16):
        assert not set(outcomes[0]["seen"][step]) & set(outcomes[1]["seen"][step])


def test_drop_last_leaves_nothing_out_for_ever(trained: Outcomes) -> None:
    """Chunks of 32 in batches of 5: the last 2 samples open the next epoch."""
    for outcome in trained["drop last"]:
        assert {len(batch) for batch in outcome["seen"]} == {5}
        assert len(outcome["seen"]) == 18
        assert set(joined(outcome["seen"])) == set(range(SAMPLES))


@pytest.mark.parametrize(("kind", "kwargs", "sampler", "batch_sampler", "first"), LOADERS)
def test_loaders_are_respected(
    kind: str, kwargs: dict[str, Any], sampler: str, batch_sampler: str, first: list[int] | None, trained: Outcomes
) -> None:
    seen, used_sampler, used_batch_sampler = trained[kind, str(kwargs)][0]
    assert (used_sampler, used_batch_sampler) == (sampler, batch_sampler)
    assert first is None or seen[0] == first
    if kind == "batch sampler":
        assert {len(batch) for batch in seen} == {2}


def test_data_injection(trained_by_four: Outcomes) -> None:
    """alpha = beta = 0.5 of 4 ranks: batches of b' = 8 / (1 + 0.25 * 4) = 4, and 2 ranks share 2 samples with all."""
    outcomes = trained_by_four["injection"]
    for step in range(8):
        batches = [outcome["seen"][step] for outcome in outcomes]
        own = [batch[:4] for batch in batches]
        received = [batch[4:] for batch in batches]
        sharing = [rank for rank in range(4) if len(received[rank]) == 2]
        assert len(sharing) == 2
        for rank in range(4):
            others = [r for r in sharing if r != rank]
            assert len(received[rank]) == 2 * len(others)
            for i, other in enumerate(others):
                assert set(received[rank][2 * i : 2 * i + 2]) <= set(own[other])


@pytest.mark.parametrize("kind", REFUSED)
def test_loaders_that_are_refused(kind: str, trained: Outcomes) -> None:
    for outcome in trained[kind]:
        assert_refused(dict.fromkeys(REFUSED[kind], outcome))


def test_only_training_is_touched(trained: Outcomes) -> None:
    """Validation, the sanity check before training too, has Lightning's order and the user's batches, uninjected."""
    for rank, (validated_on, trained_on, sampler) in enumerate(trained["validating"]):
        shard = list(range(rank, SAMPLES, 2))
        assert validated_on == [(True, shard[:16]), (False, shard[:16]), (False, shard[16:])]
        assert sampler == "DistributedSampler"
        assert trained_on == [4 + 2] * 8
