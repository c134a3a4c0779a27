"""The device mesh of a Trainer's strategy: modules that are written for Lightning's ModelParallelStrategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import DeARStrategy, LocalSGDStrategy, SelSyncStrategy
from tests.nightly.shards.test_lightning_sharded import Sharding
from tests.nightly.shards.test_sharded_replicas import REPLICAS, SHARDS, sharded, whole
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised
from tests.support.lightning_models import trainer

RANKS = REPLICAS * SHARDS


def data() -> TensorDataset:
    """24 samples: their index, input and target."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 6, generator=generator), torch.randn(24, 3, generator=generator)
    return TensorDataset(torch.arange(24), x, y)


class Module(Sharding):
    """It records what it trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

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
        assert self.device_mesh is not None
        with torch.device("meta"):
            self.layers = sharded(self.device_mesh["data_parallel"])
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


def run_of(strategy: Any, ranks: int = RANKS, **settings: Any) -> Any:
    return trainer(strategy, ranks, "/tmp", max_epochs=1, **settings)


def fit(make: Callable[[], Module], strategy: Any, **settings: Any) -> tuple[list[Tensor], list[list[int]]]:
    module = make()
    ranks = int(os.environ["WORLD_SIZE"])
    run_of(strategy, ranks, **settings).fit(module, DataLoader(data(), batch_size=3, shuffle=True))
    return whole(module), module.seen


def fit_by(sizes: dict[str, int], make: Callable[[], Module] = Module) -> tuple[list[Tensor], list[list[int]]]:
    return fit(make, DeARStrategy(timeout_s=60, **sizes))


def fit_by_lightning() -> tuple[list[Tensor], list[list[int]]]:
    return fit(Module, ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1))


def validate(make: Callable[[], Module], folder: Path) -> list[list[Tensor]]:
    """Validates a module that was not trained, trains it, and validates it again, from a checkpoint in another one."""
    loader = DataLoader(data(), batch_size=3)
    run = run_of(DeARStrategy(timeout_s=60, ranks_per_replica=SHARDS))
    with run.init_module(empty_init=True):
        module, other = make(), make()
    run.validate(module, loader, verbose=False)
    found = [module.validated]
    run.fit(module, loader)
    run.save_checkpoint(folder / f"{make.__name__}.ckpt")
    run.validate(module, loader, verbose=False)
    found.append(module.validated)
    run.validate(other, loader, folder / f"{make.__name__}.ckpt", verbose=False)
    return [*found, other.validated]


def with_other_numbers_of_batches() -> Any:
    """The ranks that hold the same shard have as many, and those of a replica have not."""
    loader = DataLoader(data(), batch_size=3)
    run = run_of(DeARStrategy(timeout_s=20, ranks_per_replica=SHARDS), use_distributed_sampler=False)
    run.limit_train_batches = 3 + int(os.environ["RANK"]) % SHARDS
    return raised(lambda: run.fit(Module(), loader))


def refuse(make: Callable[[], Module], strategy: Callable[[], Any]) -> Any:
    return raised(lambda: fit(make, strategy()))


def average(callback: Callable[[], Any], **layout: Any) -> Any:
    strategy = DeARStrategy(timeout_s=20, **layout)
    return raised(lambda: fit(Module, strategy, callbacks=[callback()]))


#: By what each says, what is refused.
REFUSED: dict[str, Callable[[], Any]] = {
    "ranks_per_replica=2 is for a model that is sharded, and this Whole is not: shard it in configure_model": partial(
        refuse, Whole, partial(SelSyncStrategy, timeout_s=20, ranks_per_replica=2)
    ),
    "ranks_per_replica=3 does not divide the number of ranks, 4: set one of 1, 2, 4": partial(
        refuse, Module, partial(DeARStrategy, timeout_s=20, ranks_per_replica=3)
    ),
    "Parameter layers.0.weight is divided among 2 ranks": partial(
        refuse, Module, partial(DeARStrategy, timeout_s=20, ranks_per_replica=4, tensor_parallel_size=2)
    ),
    "there are 2 different batches at a time, and tensor_parallel_size of strategy='dear' says": partial(
        refuse, OnItsOwnMesh, partial(DeARStrategy, timeout_s=20)
    ),
    "EMAWeightAveraging copies the module": partial(average, EMAWeightAveraging, ranks_per_replica=2),
    " copies the module, and FSDP2 does not allow that": partial(average, WeightAveraging),
    "StochasticWeightAveraging copies the module": partial(
        average, partial(StochasticWeightAveraging, swa_lrs=0.1), ranks_per_replica=2
    ),
    "The ranks have different numbers of training batches, by rank: [3, 4, 3, 4]": with_other_numbers_of_batches,
}


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    return launch_cases(
        {
            "by the mesh": partial(fit_by, {"ranks_per_replica": SHARDS}),
            "by Lightning": fit_by_lightning,
            "tensor parallel": partial(fit_by, {"ranks_per_replica": 2, "tensor_parallel_size": 2}, Tensorwise),
            "whole groups": partial(fit, Whole, LocalSGDStrategy(period=100, ranks_per_replica=2, timeout_s=60)),
            "validate": partial(validate, Different, folder),
            "validate, empty": partial(validate, Empty, folder),
            **REFUSED,
        },
        RANKS,
        init=False,
    )


def test_a_module_for_model_parallel_strategy_trains_unchanged(outcomes: Outcomes) -> None:
    """As under Lightning's strategy, which shards among all ranks, but for the order of sums."""
    for (found, seen), (expected, of_lightning) in zip(outcomes["by the mesh"], outcomes["by Lightning"], strict=True):
        torch.testing.assert_close(found, expected)
        assert seen == of_lightning


def test_ranks_of_tensor_parallelism_get_the_same_batches(outcomes: Outcomes) -> None:
    alone = launch_cases({"whole": partial(fit_by, {}, Tensorwise)}, REPLICAS, init=False)
    for rank, (weights, seen) in enumerate(outcomes["tensor parallel"]):
        expected, of_replica = alone["whole"][rank // SHARDS]
        assert seen == of_replica
        torch.testing.assert_close(weights, expected)


def test_whole_modules_train_in_groups_by_the_same_setting(outcomes: Outcomes) -> None:
    """The ranks of a group average their gradients, and have other weights than the other group, until the end."""
    weights = [weights for weights, _ in outcomes["whole groups"]]
    assert all(map(torch.equal, weights[0], weights[3]))
    assert len({tuple(map(tuple, seen)) for _, seen in outcomes["whole groups"]}) == RANKS


@pytest.mark.parametrize("case", ["validate", "validate, empty"])
def test_replicas_are_validated_with_the_weights_of_the_first(case: str, outcomes: Outcomes) -> None:
    before, after, loaded = outcomes[case][0]
    assert not all(map(torch.equal, before, after))
    assert all(value.isfinite().all() for value in before)
    for found in outcomes[case]:
        for weights, expected in zip(found, (before, after, after), strict=True):
            assert all(map(torch.equal, weights, expected))
    assert all(map(torch.equal, loaded, after))


@pytest.mark.parametrize("says", REFUSED)
def test_refused_on_all_ranks(says: str, outcomes: Outcomes) -> None:
    for outcome in outcomes[says]:
        assert_refused({says: outcome})


def test_sizes_that_do_not_fit() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "ranks_per_replica must be an integer of at least 1, got 0": {"ranks_per_replica": 0},
        "ranks_per_replica must be an integer, got 'two'": {"ranks_per_replica": "two"},
        "tensor_parallel_size=3 does not divide ranks_per_replica=4: set one of 1, 2, 4": {
            "ranks_per_replica": 4,
            "tensor_parallel_size": 3,
        },
    }
    for says, sizes in wrong.items():
        for strategy in (DeARStrategy, LocalSGDStrategy):
            assert_refused({says: raised(partial(strategy, **sizes))})
    with pytest.raises(RuntimeError, match="ranks_per_replica is 1"):
        DeARStrategy().device_mesh  # noqa: B018
