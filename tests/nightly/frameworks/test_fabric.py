"""What is particular to Fabric: checkpoints in a run and after it, models one after the other, and data."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from lightning_pipesync import SelDPSampler, SelSync
from lightning_pipesync.fabric import DeARFabricStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.fabric_runs import NAMES, ended, launched, scaling
from tests.support.harness import on_ranks, raised
from tests.support.lightning_models import dataset
from tests.support.models import assert_same, loss, seeded_mlp, state

SETTINGS: dict[str, dict[str, Any]] = {
    "dear": {"fusion": "buffer", "bucket_mb": 1e-4, "compression": "bf16"},
    "pipe_sgd": {"compression": "int8"},
    "selsync": {"delta": 0.3, "smoothing": 0.5, "compression": "bf16"},
}


def save(name: str, path: Path) -> dict[str, dict[str, Tensor]]:
    """Trains, saves, trains on, and goes back, also with the weights alone."""
    fabric = launched(name, SETTINGS[name], plugins=[scaling(2.0**10)])
    torch.manual_seed(100 + fabric.global_rank)
    model = nn.Sequential(seeded_mlp(fabric.global_rank, batch_norm=True), nn.Dropout(0.2))
    model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.01))
    progress = {"model": model, "optimizer": optimizer}

    def steps(numbers: range) -> dict[str, Tensor]:
        for i in numbers:
            optimizer.zero_grad()
            fabric.backward(loss(model, i, fabric.global_rank))
            optimizer.step()
        return state(model)

    steps(range(5))
    fabric.save(path, progress)
    fabric.save(path.with_suffix(".weights"), {"model": model})
    result = {"weights": steps(range(5, 11))}
    fabric.load(path, progress)
    result["weights again"] = steps(range(5, 11))
    fabric.load(path.with_suffix(".weights"), {"model": model})
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(range(3))  # nothing is left of what was under way
    return {**result, "reloaded": {name: value.detach().clone() for name, value in model.named_parameters()}}


def train_folds(name: str) -> list[list[int]]:
    """Models one after the other; rank 1 keeps one, and the last is set up again. Threads and methods at each."""
    fabric = launched(name, SETTINGS[name])
    kept, seen, net = [], [], nn.Module()
    for fold in range(6):
        net = seeded_mlp(fold) if fold != 5 else net
        before = [parameter.clone() for parameter in net.parameters()]
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
        for i in range(4):
            optimizer.zero_grad()
            fabric.backward(loss(model, i, fabric.global_rank))
            optimizer.step()
        with fabric.strategy.consolidated():
            assert not any(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
            if fold < 3:
                assert fabric.strategy.method_of() is fabric.strategy.method_of(optimizer)
        if fold == 2 and fabric.global_rank == 1:
            kept.append(model)
        seen.append([threading.active_count(), len(fabric.strategy._sessions.sessions)])
    fabric.strategy.teardown()
    optimizer.optimizer.step()  # it is the user's own
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    fabric.backward(loss(model, 0, fabric.global_rank))
    optimizer.step()
    seen.append([threading.active_count(), len(fabric.strategy._sessions.sessions)])
    return seen


def order_of_the_data() -> tuple[list[list[int]], Any, Any]:
    """The order of a Fabric's loader in three epochs, and with injection, in a Fabric and in a plain loop."""
    injected, environment = {}, dict(os.environ)
    for name in ("fabric", "alone"):
        os.environ.update(environment)
        model = seeded_mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        if name == "alone":
            sync = SelSync(model, optimizer, injection=(0.5, 0.5))
            injected[name] = [indices.tolist() for indices, *_ in sync.prepare_train_loader(DataLoader(dataset(), 8))]
            sync.detach()
            continue
        fabric = launched("selsync", {"injection": (0.5, 0.5)})
        model, optimizer = fabric.setup(model, optimizer)
        loss(model, 0, fabric.global_rank).backward()
        refused = raised(optimizer.step)
        loader = fabric.strategy.prepare_train_loader(DataLoader(dataset(), 8))
        injected[name] = [indices.tolist() for indices, *_ in loader]
        optimizer.step()
    fabric = launched("selsync")
    sampler = SelDPSampler(dataset())
    loader = fabric.setup_dataloaders(DataLoader(dataset(), 4, sampler=sampler))
    assert loader.sampler is sampler
    return [[int(index) for indices, *_ in loader for index in indices] for _ in range(3)], injected, refused


def inject_after(change: str, folder: Path) -> list[list[int]]:
    """The batches of a second epoch, after a checkpoint was loaded, or another optimizer was set up, or neither."""
    fabric = launched("selsync", {"injection": (0.5, 0.5)})
    model = seeded_mlp()
    wrapped, optimizer = fabric.setup(model, SGD(model[0].parameters(), lr=0.1))
    loader = fabric.strategy.prepare_train_loader(DataLoader(dataset(), 8))
    progress = {"model": wrapped, "optimizer": optimizer, "loader": loader}
    seen: list[list[int]] = []
    for epoch in range(2):
        if epoch and change == "checkpoint":
            fabric.save(folder / "injected", progress)
            fabric.load(folder / "injected", progress)
        elif epoch and change == "optimizer":
            fabric.setup_optimizers(SGD(model[2].parameters(), lr=0.1))
        seen.clear()
        for i, (indices, *_) in enumerate(loader):
            seen.append(indices.tolist())
            fabric.backward(loss(wrapped, i, fabric.global_rank))
            optimizer.step()
    fabric.strategy.teardown()
    return seen


#: After which a loader is used on.
CHANGES = ("nothing", "checkpoint", "optimizer")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        ("folds", name): partial(ended, train_folds, name) for name in NAMES
    }  # which count threads
    cases |= {("saved", name): partial(ended, save, name, folder / name) for name in NAMES}
    cases |= {("injection", change): partial(ended, inject_after, change, folder) for change in CHANGES}
    return launch_cases({**cases, "data": partial(ended, order_of_the_data)}, 2, init=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_back_to_its_checkpoint(name: str, trained: Outcomes, folder: Path) -> None:
    """Bit for bit; or to the weights alone."""
    weights_only = torch.load(folder / f"{name}.weights", weights_only=True)
    assert list(weights_only) == ["model"]
    for outcome in trained["saved", name]:
        assert_same(outcome["weights again"], outcome["weights"])
        for key, value in outcome["reloaded"].items():
            assert torch.equal(value, weights_only["model"][key.removeprefix("_forward_module.module.")]), key


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_no_rank_holds_is_released(name: str, trained: Outcomes) -> None:
    for seen in trained["folds", name]:
        # A name stands for the model before until it is set up.
        assert [methods for _, methods in seen] == [1, 2, 2, 2, 3, 2, 1]
        assert seen[0][0] == seen[6][0] + 1, "teardown has ended the watch over the job, too"
        assert seen[1] == seen[2] == seen[3] == seen[5]


def test_the_training_data_of_selsync(trained: Outcomes) -> None:
    """Fabric leaves a sampler alone, and tells it the epoch; with ``prepare_train_loader`` it is as in a plain loop."""
    for rank, (epochs, injected, refused) in enumerate(trained["data"]):
        assert injected["fabric"] == injected["alone"]
        assert max(map(len, injected["alone"])) == 5 + 2
        assert refused is not None
        assert "injection=(0.5, 0.5) has no effect" in refused[1]
        for epoch, seen in enumerate(epochs):
            sampler = SelDPSampler(dataset(), 2, rank)
            sampler.set_epoch(epoch)
            assert seen == list(sampler)
        assert sorted(epochs[0] + epochs[1]) == list(range(64))


@pytest.mark.parametrize("change", CHANGES[1:])
def test_a_prepared_loader_follows_the_method_of_that_time(change: str, trained: Outcomes) -> None:
    """A checkpoint has the place in the sequence of draws; with another optimizer it begins anew."""
    for batches, expected in zip(trained["injection", change], trained["injection", "nothing"], strict=True):
        assert max(map(len, batches)) == 5 + 2
        assert change == "optimizer" or batches == expected


def end_early(fabric: Fabric, file: Path) -> None:
    """Rank 0 returns when its last weights are still on their way to rank 1, which looks at them."""
    model = nn.Linear(4000, 4000)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(1, 4000)).square().mean())
        optimizer.step()
    if fabric.global_rank == 1:
        file.write_text(f"{model(torch.ones(1, 4000)).square().mean():.3f}")


def fork_ranks(file: Path) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):  # Fabric itself starts the processes
        del os.environ[name]
    strategy = DeARFabricStrategy(start_method="fork", fusion="buffer")
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(end_early, file)


def test_a_rank_that_is_done_has_sent_everything(tmp_path: Path) -> None:
    on_ranks(fork_ranks, 1, tmp_path / "loss", init=False)
    assert float((tmp_path / "loss").read_text()) > 0
