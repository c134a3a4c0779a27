"""The data of a plain loop with SelSync: against the simulation and the Trainer, resumed, and set but not followed."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

from lightning_pipesync import LabelSkewedSampler, SelDPSampler, SelSync
from tests.references.selsync import simulate
from tests.references.training_data import training_batches
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, assert_refused, on_ranks, raised
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


def with_both(directory: Path, case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    fitted = fit(directory, {**SELSYNC, **case}, loader={"batch_size": BATCH_SIZE}, max_epochs=EPOCHS)
    return fitted, in_a_plain_loop(case)


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
    cases = {name: partial(with_both, tmp_path, settings) for name, settings in CASES.items()}
    outcomes = launch_cases(cases, 2, init=False)
    for name, settings in CASES.items():
        for trainer, plain in outcomes[name]:
            assert trainer["seen"] == plain["seen"], name
            assert torch.equal(trainer["weights"], plain["weights"]), name
        assert_follows_the_simulation([plain for _, plain in outcomes[name]], settings)


def resumed() -> Any:
    whole, first, second = (Loop(**SELSYNC, injection=(0.5, 0.5)) for _ in range(3))
    whole.train()
    first.train(stop_after=2 * len(whole.loader) - 2)  # within the second of three epochs
    for name in ("model", "sync", "loader"):
        getattr(second, name).load_state_dict(copy.deepcopy(getattr(first, name).state_dict()))
    assert second.loader.state_dict() == {"epoch": 1, "num_batches": len(whole.loader) - 2}
    second.train()
    for loop in (whole, first, second):
        loop.sync.detach()
    return first.seen, second.seen, whole.seen, second.model.weights(), whole.model.weights()


def test_resumes_within_an_epoch() -> None:
    """Bit for bit: the batches, what is injected into them, and each rank's weights."""
    for first, second, whole, weights, expected in on_ranks(resumed, 2):
        assert first + second == whole
        assert min(len(first), len(second)) > 5
        assert torch.equal(weights, expected)


def not_followed(settings: dict[str, Any], prepares: bool) -> Any:
    """Returns what clipping and the first step raise."""
    model = Classifier()
    optimizer = model.configure_optimizers()
    before = model.weights()
    sync = SelSync(model.model, optimizer, **settings)
    loader = train_loader()
    if prepares:
        sync.prepare_train_loader(loader)  # and nobody iterates over what it returns
    _, x, y = next(iter(loader))
    nn.functional.cross_entropy(model.model(x), y).backward()
    outcomes = raised(lambda: sync.clip(1.0)), raised(sync.step)
    assert torch.equal(model.weights(), before)
    sync.detach()
    return outcomes


def own_order(name: str) -> tuple[list[list[int]], list[str], bool]:
    """Returns the samples of each batch, the warnings, and whether an epoch has drawn global random numbers."""
    data = dataset()
    settings, loader = {
        "seldp": ({}, {"sampler": SelDPSampler(data)}),
        "distributed": ({}, {"sampler": DistributedSampler(data, seed=3)}),
        "skewed": ({"partition": "defdp"}, {"sampler": LabelSkewedSampler(data.tensors[2], 1)}),
        "weighted": ({}, {"sampler": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)}),
        "batches": ({}, {"batch_sampler": BatchSampler(RandomSampler(data), BATCH_SIZE, drop_last=True)}),
    }[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = {} if "batch_sampler" in loader else {"batch_size": BATCH_SIZE}
        loop = Loop(DataLoader(data, **size, **loader), **settings)  # type: ignore[arg-type]
        if name == "seldp":  # the loop that sees to its order by itself
            for batch in loop.given:
                loop.train_on(batch)
        random_numbers = torch.get_rng_state()
        loop.train()
    loop.sync.detach()
    drawn = not torch.equal(torch.get_rng_state(), random_numbers)
    return loop.seen, [str(one.message) for one in caught], drawn


def test_an_order_of_the_users_own_stays() -> None:
    names = ("seldp", "distributed", "skewed", "weighted", "batches")
    outcomes = launch_cases({name: partial(own_order, name) for name in names}, 2)
    for rank in range(2):
        seen, warned, drawn = zip(*(outcomes[name][rank] for name in names), strict=True)
        assert not any((*warned[:3], *drawn[:3])), "what an epoch draws, a resumed run does not"
        assert {len(indices) for indices in seen[4]} == {BATCH_SIZE}
        assert len(warned[3]) == (rank == 0)
        assert all("partition='seldp' has no effect" in one and "WeightedRandomSampler" in one for one in warned[3])
        assert seen[0][:4] == seen[0][4:8]
        for batches, seed in ((seen[0][4:], 0), (seen[1], 3)):  # the latter is DDP's order, whose place SelDP takes
            expected, sampler = [], SelDPSampler(dataset(), 2, rank, seed=seed)
            for epoch in range(EPOCHS):
                sampler.set_epoch(epoch)
                expected += list(sampler)
            assert [index for indices in batches for index in indices] == expected
        labels = dataset().tensors[2]
        assert {int(labels[index]) for indices in seen[2] for index in indices} == {rank}


def refusals() -> dict[str, Any]:
    """Returns what preparing a loader raises, by words of it."""
    data, rank = dataset(), dist.get_rank()
    first, second = Classifier(), Classifier()
    sharing = SelSync(first.model, first.configure_optimizers(), injection=(0.5, 0.5))
    passing = SelSync(second.model, second.configure_optimizers(), full_pass=True)
    wrong: dict[str, tuple[SelSync, Any]] = {
        "batch_size=None": (sharing, DataLoader(data, batch_size=None)),
        "attribute 'sampler'": (sharing, DataLoader(data, batch_sampler=[[0, 1], [2, 3]])),
        "this is a list": (sharing, [data.tensors] if rank else train_loader()),
        "full_pass=True has no effect on a RandomSampler": (
            passing,
            DataLoader(data, 8, sampler=RandomSampler(data, replacement=True)),
        ),
        "full_pass=True has no effect on a SelDPSampler": (passing, DataLoader(data, 8, sampler=SelDPSampler(data))),
        "1 samples are too few": (passing, DataLoader(Subset(data, [0]))),
        "training batches in an epoch: rank 0 has 8, rank 1 has 9": (
            sharing,
            DataLoader(data, 6, sampler=range(32 + rank)),
        ),
    }
    outcomes = {words: raised(lambda one=one: one[0].prepare_train_loader(one[1])) for words, one in wrong.items()}
    sharing.detach()
    passing.detach()
    return outcomes


def test_what_cannot_be_followed_is_refused_on_all_ranks() -> None:
    """When the loader is prepared; or at the first step, if none was."""
    outcomes = launch_cases(
        {
            "prepared": refusals,
            "injection": partial(not_followed, {"injection": (0.5, 0.5)}, prepares=False),
            "full pass": partial(not_followed, {"full_pass": True}, prepares=True),
        },
        2,
    )
    for rank in range(2):
        assert_refused(outcomes["prepared"][rank])
        for name, value, default in (("injection", (0.5, 0.5), None), ("full_pass", True, False)):
            for outcome in outcomes[name.replace("_", " ")][rank]:
                words = (f"{name}={value!r} has no effect", f"or set {name}={default!r}", "prepare_train_loader")
                assert_raised(outcome, "ValueError", *words)
