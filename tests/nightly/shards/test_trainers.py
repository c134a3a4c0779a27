"""Modules that a Trainer's or Fabric's own mesh shards: those that are written for ModelParallelStrategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import DeARStrategy, LocalSGDStrategy
from lightning_pipesync.fabric import DeARFabricStrategy
from tests.support.case_table import Outcomes
from tests.support.lightning_models import trainer
from tests.support.shards import (
    RANKS,
    REPLICAS,
    SHARDS,
    adamw,
    batch,
    device_mesh,
    equal,
    launch_sharded,
    model,
    shard,
    sharded,
    whole,
)


def data() -> TensorDataset:
    """24 samples: their index, input and target."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 6, generator=generator), torch.randn(24, 3, generator=generator)
    return TensorDataset(torch.arange(24), x, y)


class Module(pl.LightningModule):
    """FSDP2 shards it by the strategy's mesh, or by one of its own; it records what it trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            mesh = device_mesh()["shards"] if self.device_mesh is None else self.device_mesh["data_parallel"]
            self.layers = sharded(mesh)

    def training_step(self, batch: Any, _: int) -> Tensor:
        indices, x, y = batch
        self.seen.append(indices.tolist())
        return (self.layers(x) - y).square().mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated = whole(self)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


class Tensorwise(Module):
    """Two linear layers, of which each rank of a replica has the halves that belong together."""

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        if (mesh := self.mesh_of_tensors()) is not None:
            parallelize_module(self.layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def mesh_of_tensors(self) -> DeviceMesh | None:
        return None if self.device_mesh is None else self.device_mesh["tensor_parallel"]


class OnItsOwnMesh(Tensorwise):
    """It makes the mesh, of which the strategy does not know."""

    def mesh_of_tensors(self) -> DeviceMesh:
        mesh = init_device_mesh("cpu", (RANKS // SHARDS, SHARDS), mesh_dim_names=("replicas", "tensor_parallel"))
        return mesh["tensor_parallel"]


class Whole(Module):
    """It does not shard itself."""

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Linear(6, 3)


class Different(Module):
    """Each rank begins with weights of its own, in memory that it takes once it has sharded a model without."""

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        with torch.device("meta"):
            super().configure_model()
        self.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(float(torch.rand(())) / 10)


class Empty(Module):
    """It is made without memory; the strategy gives it some, and its layers their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))

    def configure_model(self) -> None:
        if isinstance(self.layers, FSDPModule):
            return
        assert all(parameter.is_meta for parameter in self.parameters())
        assert self.device_mesh is not None
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
        torch.manual_seed(dist.get_rank())


def run_of(strategy: Any, **settings: Any) -> pl.Trainer:
    return trainer(strategy, int(os.environ["WORLD_SIZE"]), "/tmp", max_epochs=1, **settings)


def fit(make: Callable[[], Module], strategy: Callable[[], Any]) -> tuple[list[Tensor], list[list[int]]]:
    module = make()
    run_of(strategy()).fit(module, DataLoader(data(), batch_size=3, shuffle=True))
    return whole(module), module.seen


def validate(make: Callable[[], Module], folder: Path) -> list[list[Tensor]]:
    """Validates a module that was not trained, trains it, and validates it again, from a checkpoint in another one."""
    loader, path = DataLoader(data(), batch_size=3), folder / f"{make.__name__}.ckpt"
    run = run_of(DeARStrategy(timeout_s=60, ranks_per_replica=SHARDS))
    with run.init_module(empty_init=True):
        module, other = make(), make()
    run.validate(module, loader, verbose=False)
    found = [module.validated]
    run.fit(module, loader)
    run.save_checkpoint(path)
    run.validate(module, loader, verbose=False)
    found.append(module.validated)
    run.validate(other, loader, path, verbose=False)
    return [*found, other.validated]


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return shard(module, mesh["data_parallel"])


def launched(**layout: Any) -> Fabric:
    strategy = DeARFabricStrategy(timeout_s=60, ranks_per_replica=SHARDS, **layout)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    return fabric


def step_in_fabric(fabric: Fabric, network: Any, optimizer: Any, step: int) -> list[Tensor]:
    inputs, targets = batch(fabric.global_rank, step)
    optimizer.zero_grad()
    fabric.backward((network(inputs) - targets).square().mean())
    optimizer.step()
    with fabric.strategy.consolidated():
        return whole(network)


def load_before_setup(folder: Path) -> dict[str, list[Tensor]]:
    """A model that a function shards is saved; another one loads the whole checkpoint before it is set up."""
    fabric = launched(parallelize_fn=parallelize)
    network, optimizer = fabric.setup(module := model(), adamw(module))
    found = {"saved": step_in_fabric(fabric, network, optimizer, 0)}
    fabric.save(folder / "fabric.pt", {"model": network, "optimizer": optimizer})
    fabric.strategy.teardown()
    fabric = launched()
    with fabric.init_module(empty_init=True):
        module = model()
    module = parallelize(module, fabric.strategy.device_mesh)
    module.to_empty(device="cpu")
    fabric.load(folder / "fabric.pt", {"model": module})
    fabric.strategy.teardown()
    return {**found, "loaded": whole(module)}


def make_empty() -> list[list[Tensor]]:
    """Replicas give their layers different values, where they have no memory yet; the second model is not trained."""
    fabric = launched(parallelize_fn=parallelize)
    models = []
    for _ in range(2):
        with fabric.init_module(empty_init=True):
            module = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        assert module[0].weight.is_meta
        torch.manual_seed(fabric.global_rank)
        models.append(fabric.setup_module(module))
    begun = [whole(module) for module in models]
    optimizer = fabric.setup_optimizers(SGD(models[0].parameters(), lr=0.1))
    trained = step_in_fabric(fabric, models[0], optimizer, 0)
    fabric.strategy.teardown()
    return [*begun, trained]


def dear(**sizes: int) -> Callable[[], Any]:
    return partial(DeARStrategy, timeout_s=60, **sizes)


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        "mesh": partial(fit, Module, dear(ranks_per_replica=SHARDS)),
        "Lightning": partial(
            fit, Module, partial(ModelParallelStrategy, data_parallel_size=RANKS, tensor_parallel_size=1)
        ),
        "tensor parallel": partial(fit, Tensorwise, dear(ranks_per_replica=2, tensor_parallel_size=2)),
        "groups": partial(fit, Whole, partial(LocalSGDStrategy, period=100, ranks_per_replica=2, timeout_s=60)),
        "loaded before": partial(load_before_setup, folder),
        "empty in Fabric": make_empty,
    }
    cases |= {make: partial(validate, make, folder) for make in (Different, Empty)}
    return launch_sharded(cases, RANKS, init=False)


def test_a_module_for_model_parallel_strategy_trains_unchanged(outcomes: Outcomes) -> None:
    """As under Lightning's strategy, which shards among all ranks, but for the order of sums."""
    for (found, seen), (expected, of_lightning) in zip(outcomes["mesh"], outcomes["Lightning"], strict=True):
        torch.testing.assert_close(found, expected)
        assert seen == of_lightning


def test_ranks_of_tensor_parallelism_get_the_same_batches(outcomes: Outcomes) -> None:
    alone = launch_sharded({"whole": partial(fit, Tensorwise, dear())}, REPLICAS, init=False)
    for rank, (weights, seen) in enumerate(outcomes["tensor parallel"]):
        expected, of_replica = alone["whole"][rank // SHARDS]
        assert seen == of_replica
        torch.testing.assert_close(weights, expected)


def test_whole_modules_train_in_groups_by_the_same_setting(outcomes: Outcomes) -> None:
    """The ranks of a group average their gradients, and have other weights than the other group, until the end."""
    weights = [weights for weights, _ in outcomes["groups"]]
    assert equal(weights[0], weights[3])
    assert len({tuple(map(tuple, seen)) for _, seen in outcomes["groups"]}) == RANKS


@pytest.mark.parametrize("make", [Different, Empty])
def test_replicas_are_validated_with_the_weights_of_the_first(make: Any, outcomes: Outcomes) -> None:
    before, after, _ = outcomes[make][0]
    assert not equal(before, after)
    assert all(value.isfinite().all() for value in before)
    for found in outcomes[make]:
        assert all(equal(*both) for both in zip(found, (before, after, after), strict=True))


def test_fabric_loads_a_whole_checkpoint_before_the_set_up(outcomes: Outcomes) -> None:
    for found in outcomes["loaded before"]:
        assert equal(found["loaded"], outcomes["loaded before"][0]["saved"])


def test_models_without_memory_get_some_in_fabric_and_replicas_are_the_first(outcomes: Outcomes) -> None:
    begun, teacher, trained = outcomes["empty in Fabric"][0]
    assert all(value.isfinite().all() and value.abs().max() < 2 for value in (*begun, *teacher))
    assert not equal(begun, trained)
    for found in outcomes["empty in Fabric"]:
        assert all(equal(*both) for both in zip(found, (begun, teacher, trained), strict=True))
