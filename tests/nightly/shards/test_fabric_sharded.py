"""Sharded models in a Fabric loop: what a plain loop trains; sharded before the set-up, or by ``parallelize_fn``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from lightning_pipesync.fabric import DeARFabricStrategy, LocalSGDFabricStrategy, SelSyncFabricStrategy
from tests.nightly.shards.test_sharded_replicas import (
    CASES,
    REPLICAS,
    SETTINGS,
    SHARDS,
    STEPS,
    Block,
    adamw,
    batch,
    device_mesh,
    model,
    sharded,
    train,
    whole,
)
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised

NAMES = ("dear", "pipe_sgd", "selsync", "diloco")
CLIPPED = [f"{name}, clipped" for name in NAMES[:3]]
PASSES = [f"{name}, two passes" for name in NAMES[1:3]]
SAVED_AT = 4


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards as :func:`sharded` does."""
    for block in [child for child in module if isinstance(child, Block)]:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(module, mesh=mesh["data_parallel"])


def forget(module: nn.Module, mesh: DeviceMesh) -> None:
    """Returns nothing."""


#: With a function and the number of ranks of a replica; without, a model is sharded before it is set up.
BY_FUNCTION = {"parallelize_fn": parallelize, "ranks_per_replica": SHARDS}


def launched(name: str, **arguments: Any) -> Fabric:
    method, settings = SETTINGS[name]
    strategy = STRATEGY_REGISTRY[method]["strategy"](timeout_s=60, **settings, **arguments)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    return fabric


class Training:
    """A model and its optimizer, set up by Fabric."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self.fabric = launched(name, **arguments)
        module = model() if arguments else sharded(device_mesh()["shards"])
        self.model, self.optimizer = self.fabric.setup(module, adamw(module))

    def run(self, steps: Iterable[int], max_norm: float | None = None, passes: int = 1) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            inputs, targets = batch(self.fabric.global_rank, step)
            for index in range(passes):
                with self.fabric.no_backward_sync(self.model, enabled=index < passes - 1):
                    self.fabric.backward((self.model(inputs) - targets).square().mean())
            if max_norm is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm)
            self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def weights(self) -> list[Tensor]:
        assert self.fabric.strategy.method_of().metrics()["mib_sent"] > 0
        with self.fabric.strategy.consolidated():
            return whole(self.model)


def train_in_fabric(case: dict[str, Any], **arguments: Any) -> list[Tensor]:
    training = Training(case["name"], **arguments)
    training.run(range(STEPS), case.get("max_norm"), case.get("passes", 1))
    return training.weights()


def save_and_resume(name: str, folder: Path) -> dict[str, list[Tensor]]:
    """Saves a run, goes on, goes back to what it has saved, and resumes in another run, which is sharded otherwise."""
    path = folder / f"{name}.pt"
    first = Training(name)
    first.run(range(SAVED_AT))
    first.fabric.save(path, first.state)
    first.run(range(SAVED_AT, STEPS))
    found = {"uninterrupted": first.weights()}
    first.fabric.load(path, first.state)
    first.run(range(SAVED_AT, STEPS))
    found["again"] = first.weights()
    second = Training(name, **BY_FUNCTION)
    second.fabric.load(path, second.state)
    with second.fabric.strategy.consolidated():
        found["loaded"] = whole(second.model)
    second.run(range(SAVED_AT, STEPS))
    found["resumed"] = second.weights()
    return found


def load_before_setup(folder: Path) -> list[Tensor]:
    """A sharded model loads a whole checkpoint before it is set up."""
    fabric = launched("dear", ranks_per_replica=SHARDS)
    with fabric.init_module(empty_init=True):
        module = model()
    module = parallelize(module, fabric.strategy.device_mesh)
    module.to_empty(device="cpu")
    fabric.load(folder / "dear.pt", {"model": module})
    return whole(module)


def make_empty() -> list[list[Tensor]]:
    """Replicas give their layers different values, where they have no memory yet; the second model is not trained."""
    fabric = launched("dear", **BY_FUNCTION)
    models = []
    for _ in range(2):
        with fabric.init_module(empty_init=True):
            module = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        assert module[0].weight.is_meta
        torch.manual_seed(fabric.global_rank)
        models.append(fabric.setup_module(module))
    begun = [whole(module) for module in models]
    optimizer = fabric.setup_optimizers(SGD(models[0].parameters(), lr=0.1))
    fabric.backward(models[0](batch(fabric.global_rank, 0)[0]).square().mean())
    optimizer.step()
    with fabric.strategy.consolidated():
        return [*begun, whole(models[0])]


def setup_whole(strategy: Callable[[], Any]) -> None:
    fabric = Fabric(accelerator="cpu", devices=REPLICAS * SHARDS, strategy=strategy())
    fabric.launch()
    module = model()
    fabric.setup(module, adamw(module))


def setup_with_a_state() -> None:
    module = model()
    optimizer = adamw(module)
    module(batch(0, 0)[0]).square().mean().backward()
    optimizer.step()
    launched("dear", **BY_FUNCTION).setup(module, optimizer)


#: By what each says, what is refused.
REFUSED: dict[str, Callable[[], Any]] = {
    "ranks_per_replica=2 is for a model that is sharded, and this Sequential is not: pass parallelize_fn": partial(
        setup_whole, partial(SelSyncFabricStrategy, ranks_per_replica=2, timeout_s=20)
    ),
    "parallelize_fn must return the model, got None": partial(
        setup_whole, partial(DeARFabricStrategy, ranks_per_replica=2, parallelize_fn=forget, timeout_s=20)
    ),
    "ranks_per_replica=3 does not divide the number of ranks, 4": partial(
        setup_whole, partial(DeARFabricStrategy, ranks_per_replica=3, timeout_s=20)
    ),
    "AdamW has a state of whole parameters": setup_with_a_state,
}


@pytest.fixture(scope="module")
def in_plain_loops() -> Outcomes:
    return launch_cases(
        {name: partial(train, **CASES[name]) for name in (*NAMES, *CLIPPED, *PASSES)}, REPLICAS * SHARDS
    )


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {name: partial(train_in_fabric, CASES[name], **BY_FUNCTION) for name in (*CLIPPED, *PASSES)}
    cases |= {name: partial(save_and_resume, name, folder) for name in NAMES}
    cases |= {"loaded before": partial(load_before_setup, folder), "empty": make_empty}
    cases |= {says: partial(raised, function) for says, function in REFUSED.items()}
    return launch_cases(cases, REPLICAS * SHARDS, init=False)


@pytest.mark.parametrize("name", NAMES)
def test_fabric_trains_what_a_plain_loop_does_and_resumes(
    name: str, in_plain_loops: Outcomes, outcomes: Outcomes
) -> None:
    for expected, found in zip(in_plain_loops[name], outcomes[name], strict=True):
        for key in ("uninterrupted", "again", "resumed"):
            assert all(map(torch.equal, found[key], expected)), key


@pytest.mark.parametrize("name", [*CLIPPED, *PASSES])
def test_clipping_and_accumulation(name: str, in_plain_loops: Outcomes, outcomes: Outcomes) -> None:
    for expected, found in zip(in_plain_loops[name], outcomes[name], strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_that_of_a_whole_model(name: str, outcomes: Outcomes, folder: Path) -> None:
    [found, *_] = outcomes[name]
    checkpoint = torch.load(folder / f"{name}.pt", weights_only=True)
    alone = model()
    alone.load_state_dict(checkpoint["model"])
    assert all(map(torch.equal, alone.parameters(), found["loaded"]))
    optimizer = adamw(alone)
    optimizer.load_state_dict(checkpoint["optimizer"])
    [(first, state), *_] = optimizer.state.items()
    assert isinstance(first, nn.Parameter)
    assert state["exp_avg"].shape == first.shape
    assert state["exp_avg"].any()
    for weights in outcomes["loaded before"] if name == "dear" else ():
        assert all(map(torch.equal, weights, found["loaded"]))


def test_models_without_memory_get_some_and_replicas_are_the_first(outcomes: Outcomes) -> None:
    [begun, teacher, trained], *others = outcomes["empty"]
    assert all(value.isfinite().all() and value.abs().max() < 2 for value in (*begun, *teacher))
    assert not all(map(torch.equal, begun, trained))
    for found in others:
        for weights, expected in zip(found, (begun, teacher, trained), strict=True):
            assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("says", REFUSED)
def test_refused_on_all_ranks(says: str, outcomes: Outcomes) -> None:
    for outcome in outcomes[says]:
        assert_refused({says: outcome})


def test_a_function_needs_a_replica_of_several_ranks() -> None:
    for strategy in (DeARFabricStrategy, LocalSGDFabricStrategy):
        refused = raised(partial(strategy, parallelize_fn=parallelize))
        assert_refused({"parallelize_fn shards a model among the ranks of a replica, and ranks_per_replica=1": refused})
