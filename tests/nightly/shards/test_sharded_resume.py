"""Checkpoints of two replicas of two ranks, from which others resume: other numbers of replicas, and of their ranks."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_pipesync import METHODS
from tests.nightly.shards.test_fabric_sharded import parallelize
from tests.nightly.shards.test_lightning_sharded import Rows, Sharding
from tests.nightly.shards.test_sharded_replicas import SETTINGS, adamw, batch, model, sharded, whole
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised
from tests.support.lightning_models import make_strategy, trainer

#: By its number of ranks, how many hold a replica. With one, each rank has the whole model.
LAYOUTS = {4: (2, 1), 2: (2, 1), 6: (2,)}
OTHERS = [(ranks, size) for ranks, sizes in LAYOUTS.items() for size in sizes if (ranks, size) != (4, 2)]
IN_A_TRAINER, IN_FABRIC, IN_A_LOOP = ("dear", "pipe_sgd", "selsync", "diloco"), ("dear", "selsync"), ("dear", "diloco")
STEPS = 3


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def moments_of(state: dict[str, Any]) -> list[Tensor]:
    """Returns what an optimizer's whole state has of each parameter; nothing, on the ranks that have none."""
    return [state["state"][index]["exp_avg"] for index in sorted(state["state"])] if state else []


class Module(Sharding):
    """It keeps the weights, and on rank 0 the optimizer's state, with which its training begins."""

    def configure_model(self) -> None:
        if self.device_mesh is None:
            self.layers = model()
        else:
            super().configure_model()

    def on_train_start(self) -> None:
        self.loaded = whole(self)
        self.moments = moments_of(self.trainer.strategy.optimizer_state(self.optimizers().optimizer))


def in_a_trainer(name: str, folder: Path, size: int, resume: bool) -> dict[str, Any]:
    """Saves after some steps of the first epoch, or resumes, and trains to its end."""
    method, settings = SETTINGS[name]
    path = folder / f"{name}.ckpt"
    strategy = make_strategy({"name": method, "timeout_s": 60, "ranks_per_replica": size, **settings})
    saves = [] if resume else [ModelCheckpoint(folder, name, every_n_train_steps=STEPS)]
    steps = 2 * STEPS if resume else STEPS
    run = trainer(strategy, world_size(), folder, max_steps=steps, callbacks=saves, enable_checkpointing=not resume)
    module = Module()
    run.fit(module, DataLoader(Rows(), batch_size=8), ckpt_path=path if resume else None)
    return {"loaded": module.loaded, "moments": module.moments, "trained": whole(module)}


def in_fabric(name: str, folder: Path, size: int, resume: bool) -> dict[str, Any]:
    method, settings = SETTINGS[name]
    path = folder / f"{name}.fabric"
    layout = {"ranks_per_replica": size, "parallelize_fn": parallelize} if size > 1 else {}
    strategy = STRATEGY_REGISTRY[method]["strategy"](timeout_s=60, **settings, **layout)
    fabric = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
    fabric.launch()
    module = model()
    net, optimizer = fabric.setup(module, adamw(module))
    state = {"model": net, "optimizer": optimizer}
    if resume:
        fabric.load(path, state)
    found = {"loaded": whole(net), "moments": moments_of(strategy.get_optimizer_state(optimizer.optimizer))}
    for step in range(STEPS):
        inputs, targets = batch(fabric.global_rank, step)
        optimizer.zero_grad()
        fabric.backward((net(inputs) - targets).square().mean())
        optimizer.step()
    if not resume:
        fabric.save(path, state)
    with strategy.consolidated():
        return {**found, "trained": whole(net)}


def in_a_loop(name: str, folder: Path, size: int, resume: bool) -> dict[str, Any]:
    """Saves with torch.distributed.checkpoint, which gives each rank its shards when it loads."""
    method, settings = SETTINGS[name]
    path = folder / f"{name}.dcp"
    mesh = init_device_mesh("cpu", (world_size() // size, size), mesh_dim_names=("replicas", "shards"))
    module: nn.Module = model() if size == 1 else sharded(mesh["shards"])
    optimizer = adamw(module)
    if resume:
        of_model, of_optimizer = get_state_dict(module, optimizer)
        saved = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(saved, checkpoint_id=path)
        set_state_dict(module, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    found = {"loaded": whole(module), "moments": moments_in(optimizer)}
    replicas = None if size == 1 else mesh["replicas"]
    sync: Any = METHODS[method](module, optimizer, replicas=replicas, timeout_s=60, **settings)
    for step in range(STEPS):
        inputs, targets = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        sync.step()
    sync.flush()
    if not resume:
        with sync.given_back():
            of_model, of_optimizer = get_state_dict(module, optimizer)
            found["saved moments"] = moments_in(optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)
    trained = whole(module)
    sync.detach()
    return {**found, "trained": trained}


def moments_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [optimizer.state[one]["exp_avg"] for one in optimizer.param_groups[0]["params"] if optimizer.state]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for value in values]


RUNS = {
    **{(in_a_trainer, name): "ckpt" for name in IN_A_TRAINER},
    **{(in_fabric, name): "fabric" for name in IN_FABRIC},
    **{(in_a_loop, name): "dcp" for name in IN_A_LOOP},
}


def resumed(run: Any) -> tuple[Any, list[str]]:
    """Returns what a run has, or what it raises, and the warnings of what it has lost."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = raised(lambda: found.update(run()))
    return error or found, [str(one.message) for one in caught if "The checkpoint is of" in str(one.message)]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[int, Outcomes]:
    found = {}
    for ranks, sizes in LAYOUTS.items():
        cases: dict[Any, Any] = {}
        if ranks == 4:
            cases |= {(run, name): partial(run, name, folder, 2, resume=False) for run, name in RUNS}
        for size in sizes:
            if (ranks, size) != (4, 2):
                again = {(run, name, size): partial(run, name, folder, size, resume=True) for run, name in RUNS}
                cases |= {key: partial(resumed, case) for key, case in again.items()}
        found[ranks] = launch_cases(cases, ranks, init=False)
    return found


@pytest.mark.parametrize(("ranks", "size"), OTHERS)
@pytest.mark.parametrize(("run", "name"), [(run, name) for run, name in RUNS if name != "selsync"])
def test_another_layout_resumes_from_the_weights_and_the_optimizer(
    run: Any, name: str, ranks: int, size: int, outcomes: dict[int, Outcomes]
) -> None:
    """Bit for bit; on all ranks, which end with the same weights. What is lost is said on rank 0."""
    [saved, *_] = outcomes[4][run, name]
    results = outcomes[ranks][run, name, size]
    for (found, lost), rank in zip(results, range(ranks), strict=True):
        assert isinstance(found, dict), found
        assert all(map(torch.equal, found["loaded"], saved["trained"]))
        assert not all(map(torch.equal, found["trained"], found["loaded"]))
        assert all(map(torch.equal, found["trained"], results[0][0]["trained"]))
        says = f"The checkpoint is of 2 x 2 ranks (replicas x ranks of each), and there are {ranks // size} x {size}"
        expected = name != "dear" and run is not in_a_loop and rank == 0
        assert len(lost) == (1 if expected else 0)
        assert all(message.startswith(says) for message in lost)


@pytest.mark.parametrize(("ranks", "size"), OTHERS)
def test_the_state_of_an_optimizer_is_that_which_was_saved(
    ranks: int, size: int, outcomes: dict[int, Outcomes], folder: Path
) -> None:
    of_trainer = torch.load(folder / "dear.ckpt", weights_only=True)["optimizer_states"][0]
    of_fabric = torch.load(folder / "dear.fabric", weights_only=True)["optimizer"]
    [saved, *_] = outcomes[4][in_a_loop, "dear"]
    moments = {
        in_a_trainer: moments_of(of_trainer),
        in_fabric: moments_of(of_fabric),
        in_a_loop: saved["saved moments"],
    }
    for run, expected in moments.items():
        [(found, _), *_] = outcomes[ranks][run, "dear", size]
        assert all(value.any() for value in expected)
        assert [*map(torch.equal, found["moments"], expected)] == [True] * len(expected)


@pytest.mark.parametrize(("ranks", "size"), OTHERS)
@pytest.mark.parametrize("run", [in_a_trainer, in_fabric])
def test_a_replica_that_only_its_ranks_can_resume_is_refused(
    run: Any, ranks: int, size: int, outcomes: dict[int, Outcomes]
) -> None:
    says = f"the state of 2 x 2 ranks (replicas x ranks of each), and there are {ranks // size} x {size} ranks"
    for outcome, _ in outcomes[ranks][run, "selsync", size]:
        assert_refused({says: outcome})
