"""The data of a plain loop with SelSync: against the simulation and the Trainer, resumed, and set but not followed."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from lightning_pipesync import LabelSkewedSampler, SelDPSampler, SelSync
from lightning_pipesync.data.loaders import with_order
from tests.references.selsync import simulate
from tests.references.training_data import training_batches
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lightning_models import SAMPLES, Classifier, dataset, fit, train_loader
from tests.support.models import OPTIMIZERS

EPOCHS, BATCH_SIZE = 3, 8
#: Some steps are synchronized, and some are not.
SELSYNC: dict[str, Any] = {"delta": 0.4, "smoothing": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "injection": {"injection": (0.5, 0.5)},  # batches of 5, and of 2 at the end of an epoch
    "full_pass": {"full_pass": True},
    "full_pass, injection": {"full_pass": True, "injection": (1.0, 0.25)},
    "defdp, injection": {"partition": "defdp", "injection": (0.5, 1.0)},
}


class Loop:
    """A plain loop over the classifier and the data set of the Trainer's tests."""

    def __init__(self, loader: DataLoader | None = None, **settings: Any) -> None:
        self.model = Classifier()
        self.optimizer = self.model.configure_optimizers()
        self.sync = SelSync(self.model.model, self.optimizer, **settings)
        self.given = train_loader(BATCH_SIZE) if loader is None else loader
        self.loader = self.sync.prepare_train_loader(self.given)
        self.seen: list[list[int]] = []

    def train_on(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        indices, x, y = batch
        self.seen.append(indices.tolist())
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model.model(x), y).backward()
        self.sync.step()

    def train(self, stop_after: int | None = None) -> None:
        for epoch in range(self.loader.epoch, EPOCHS):
            self.loader.set_epoch(epoch)
            for batch in self.loader:
                self.train_on(batch)
                if len(self.seen) == stop_after:
                    return


def in_a_plain_loop(settings: dict[str, Any]) -> dict[str, Any]:
    loop = Loop(**SELSYNC, **settings)
    loop.train()
    own = loop.model.weights()
    loop.sync.flush()
    loop.sync.detach()
    return {
        "seen": loop.seen,
        "own": own,
        "weights": loop.model.weights(),
        "synchronized": loop.sync.num_synchronized_steps,
    }


def with_both(directory: Path) -> dict[str, tuple[Any, Any]]:
    environment, outcomes = dict(os.environ), {}
    for name, case in CASES.items():
        os.environ.update(environment)  # of which the Trainer leaves nothing
        trainer = fit(directory, {**SELSYNC, **case}, loader={"batch_size": BATCH_SIZE}, max_epochs=EPOCHS)
        outcomes[name] = trainer, in_a_plain_loop(case)
    return outcomes


def assert_follows_the_simulation(outcomes: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    world_size = len(outcomes)
    steps = list(training_batches(SAMPLES, world_size, EPOCHS, BATCH_SIZE, **settings))
    _, x, y = dataset().tensors

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        samples = torch.tensor(steps[step][rank])
        return nn.functional.cross_entropy(model(x[samples]), y[samples])

    replicas, synchronized, _ = simulate(
        Classifier().model, OPTIMIZERS["sgd"], loss, world_size=world_size, num_steps=len(steps), **SELSYNC
    )
    assert 0 < sum(synchronized) < len(steps)
    for rank, outcome in enumerate(outcomes):
        assert outcome["seen"] == [batches[rank] for batches in steps]
        assert torch.equal(outcome["own"], torch.cat([p.detach().flatten() for p in replicas[rank].parameters()]))
        assert outcome["synchronized"] == sum(synchronized)


def test_follows_the_simulation_and_trains_as_the_trainer_does(tmp_path: Path) -> None:
    """Bit for bit: the samples of every batch, each rank's weights at the end, and their average."""
    ranks = on_ranks(partial(with_both, tmp_path), 2, init=False)
    for name, settings in CASES.items():
        for outcomes in ranks:
            trainer, plain = outcomes[name]
            assert trainer["seen"] == plain["seen"], name
            assert torch.equal(trainer["weights"], plain["weights"]), name
        assert_follows_the_simulation([outcomes[name][1] for outcomes in ranks], settings)


def test_follows_the_simulation_on_four_ranks() -> None:
    settings = {"injection": (0.5, 0.5)}
    assert_follows_the_simulation(on_ranks(in_a_plain_loop, 4, settings), settings)


class Own(Sampler[int]):
    """An order of the user's own, which is that of the epoch alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i * 5 + self.epoch + dist.get_rank()) % SAMPLES for i in range(20)])

    def __len__(self) -> int:
        return 20


def loop_of(kind: str) -> Loop:
    data = dataset()
    settings: dict[str, Any] = {**SELSYNC, "injection": (0.5, 0.5)}
    if kind == "seldp":
        return Loop(**settings)
    sampler = Own() if kind == "own" else LabelSkewedSampler(data.tensors[2], 1)
    return Loop(DataLoader(data, BATCH_SIZE, sampler=sampler), **settings, partition="defdp")


def resumed(kind: str) -> Any:
    whole = loop_of(kind)
    whole.train()
    stop = 2 * len(whole.loader) - 2  # within the second of three epochs
    first = loop_of(kind)
    first.train(stop_after=stop)
    file = io.BytesIO()
    torch.save([one.state_dict() for one in (first.model, first.sync, first.loader)], file)
    file.seek(0)
    second = loop_of(kind)
    for one, saved in zip((second.model, second.sync, second.loader), torch.load(file), strict=True):
        one.load_state_dict(saved)
    assert second.loader.state_dict() == {"epoch": 1, "num_batches": len(whole.loader) - 2}
    second.train()
    for loop in (whole, first, second):
        loop.sync.detach()
    return first.seen, second.seen, whole.seen, second.model.weights(), whole.model.weights()


@pytest.mark.parametrize("kind", ["seldp", "skewed", "own"])
def test_resumes_within_an_epoch(kind: str) -> None:
    """Bit for bit: the batches, what is injected into them, and each rank's weights."""
    for first, second, whole, weights, expected in on_ranks(resumed, 2, kind):
        assert first + second == whole
        assert min(len(first), len(second)) > 5
        assert torch.equal(weights, expected)


def not_followed() -> dict[str, Any]:
    """What the first step raises, by the setting and its value."""
    outcomes = {}
    settings = [("injection", (0.5, 0.5), None), ("full_pass", True, False)]
    for name, value, default in settings:
        model = Classifier()
        optimizer = model.configure_optimizers()
        before = model.weights()
        sync = SelSync(model.model, optimizer, **{name: value})
        loader = train_loader()
        if name == "full_pass":
            sync.prepare_train_loader(loader)  # and nobody iterates over what it returns
        [(_, x, y), *_] = loader
        nn.functional.cross_entropy(model.model(x), y).backward()
        outcomes[f"{name}={value!r} has no effect"] = raised(lambda sync=sync: sync.clip(1.0))
        outcomes[f"or set {name}={default!r}"] = raised(sync.step)
        assert torch.equal(model.weights(), before)
        sync.detach()
    return outcomes


def test_a_setting_that_nobody_follows_is_refused_at_the_first_step() -> None:
    for outcomes in on_ranks(not_followed, 2):
        assert_refused(outcomes)
        assert all("prepare_train_loader" in message for _, message in outcomes.values())


def own_orders() -> dict[str, Any]:
    data, told = dataset(), {}
    batches = BatchSampler(RandomSampler(data), BATCH_SIZE, drop_last=True)
    orders: dict[str, tuple[dict[str, Any], Any]] = {
        "seldp": ({}, SelDPSampler(data)),
        "distributed": ({}, DistributedSampler(data, seed=3)),
        "skewed": ({"partition": "defdp"}, LabelSkewedSampler(data.tensors[2], 1)),
        "weighted": ({}, WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    }
    for name, (settings, sampler) in orders.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop = Loop(DataLoader(data, BATCH_SIZE, sampler=sampler), **settings)
            if name == "seldp":  # the loop that sees to its order by itself
                for batch in loop.given:
                    loop.train_on(batch)
            state = torch.get_rng_state()
            loop.train()
            drawn = not torch.equal(torch.get_rng_state(), state)
            loop.sync.detach()
        told[name] = (loop.seen, [str(one.message) for one in caught], drawn)
    loop = Loop(DataLoader(data, batch_sampler=batches))
    loop.train()
    loop.sync.detach()
    told["batches"] = (loop.seen, [], False)
    return told


def test_an_order_of_the_users_own_stays() -> None:
    for rank, told in enumerate(on_ranks(own_orders, 2)):
        for name in ("seldp", "distributed", "skewed"):
            _, warned, drawn = told[name]
            assert not warned
            assert not drawn, "an epoch draws global random numbers, and a resumed run draws fewer"
        assert {len(indices) for indices in told["batches"][0]} == {BATCH_SIZE}
        [*warned] = told["weighted"][1]
        assert len(warned) == (rank == 0)
        assert all("partition='seldp' has no effect" in one and "WeightedRandomSampler" in one for one in warned)
        for name, seed in (("seldp", 0), ("distributed", 3)):  # the latter is DDP's order, whose place SelDP takes
            expected = []
            for epoch in range(EPOCHS):
                sampler = SelDPSampler(dataset(), 2, rank, seed=seed)
                sampler.set_epoch(epoch)
                expected += list(sampler)
            seen = told[name][0]
            if name == "seldp":
                assert seen[:4] == seen[4:8]
                seen = seen[4:]
            assert [index for indices in seen for index in indices] == expected
        labels = dataset().tensors[2]
        assert {int(labels[index]) for indices in told["skewed"][0] for index in indices} == {rank}


def refusals() -> dict[str, Any]:
    data, rank = dataset(), dist.get_rank()
    model = Classifier()
    sharing = SelSync(model.model, model.configure_optimizers(), injection=(0.5, 0.5))
    passing = SelSync((other := Classifier()).model, other.configure_optimizers(), full_pass=True)

    def refused(sync: SelSync, loader: Any) -> tuple[str, str] | None:
        return raised(lambda: sync.prepare_train_loader(loader))

    outcomes = {
        "batch_size=None": refused(sharing, DataLoader(data, batch_size=None)),
        "attribute 'sampler'": refused(sharing, DataLoader(data, batch_sampler=[[0, 1], [2, 3]])),
        "this is a list": refused(sharing, [data.tensors] if rank else train_loader()),
        "full_pass=True has no effect on a RandomSampler": refused(
            passing, DataLoader(data, 8, sampler=RandomSampler(data, replacement=True))
        ),
        "full_pass=True has no effect on a SelDPSampler": refused(
            passing, DataLoader(data, 8, sampler=SelDPSampler(data))
        ),
        "1 samples are too few": refused(passing, DataLoader(Subset(data, [0]))),
        "training batches in an epoch: rank 0 has 8, rank 1 has 9": refused(
            sharing, DataLoader(data, 6, sampler=range(32 + rank))
        ),
    }
    sharing.detach()
    passing.detach()
    return outcomes


def test_what_cannot_be_followed_is_refused_on_all_ranks() -> None:
    for outcomes in on_ranks(refusals, 2):
        assert_refused(outcomes)


def test_full_pass_is_seldps() -> None:
    with pytest.raises(ValueError, match=r"full_pass=True .* partition='defdp'"):
        SelSync(nn.Linear(1, 1), [], partition="defdp", full_pass=True)


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
    order = [7, 2, 5, 0, 3, 1, 6, 4]
    loaders = [
        DataLoaderOf("rows", range(8), batch_size=2),
        DataLoaderOf("rows", range(8), batch_size=2, num_workers=1, persistent_workers=True),
        DataLoader(range(8), batch_sampler=PairSampler(range(8))),
        DataLoader(range(8), batch_sampler=BatchSampler(range(8), 2, drop_last=False)),
    ]
    for loader in loaders:
        before = [batch.tolist() for batch in loader]
        ordered = with_order(loader, order, num_samples)
        assert type(ordered) is type(loader)
        size = num_samples or 2
        assert [batch.tolist() for batch in ordered] == [order[i : i + size] for i in range(0, 8, size)]
        assert [batch.tolist() for batch in loader] == before == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_batch_sampler_without_a_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(list\) has no attribute 'sampler'"):
        with_order(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), [3, 2, 1, 0])
