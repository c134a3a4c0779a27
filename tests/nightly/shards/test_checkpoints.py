"""Checkpoints of sharded replicas: FSDP2 and Accelerate load them, and so do other numbers of replicas and ranks."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.nightly.shards.test_trainers import Module, data, parallelize
from tests.support.case_table import Outcomes
from tests.support.harness import assert_refused, raised
from tests.support.lightning_models import make_strategy, trainer
from tests.support.shards import (
    RANKS,
    SETTINGS,
    accelerator_of,
    adamw,
    attach,
    batch,
    device_mesh,
    end,
    equal,
    fresh_state,
    fsdp_plugin,
    launch_sharded,
    model,
    run,
    sharded,
    whole,
    whole_of,
)

SAVED_AT, STEPS = 5, 9  # within a round of local SGD

# --- torch.distributed.checkpoint, in plain loops ---


def save(module: Any, optimizer: Any, sync: Any, folder: Path) -> dict[str, Any]:
    """Saves the consolidated weights, each rank its shards; returns the method's own state of this rank."""
    sync.flush()
    with sync.given_back():
        of_model, of_optimizer = get_state_dict(module, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    state: dict[str, Any] = copy.deepcopy(sync.state_dict())
    sync.resume()
    dist.barrier()
    return state


def load(module: Any, optimizer: Any, folder: Path) -> None:
    """Loads a checkpoint before a method is attached."""
    of_model, of_optimizer = get_state_dict(module, optimizer)
    saved = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def resume_in_a_loop(name: str, folder: Path) -> dict[str, list[Tensor]]:
    """Returns the weights of a run that is saved at a step and goes on, of one that resumes, and what FSDP2 loads."""
    mesh, folder = device_mesh(), folder / name
    (first, *of_first), (second, *of_second), (alone, *of_alone) = (
        (module, adamw(module)) for module in (sharded(mesh["shards"]) for _ in range(3))
    )
    sync = attach(name, first, *of_first, mesh)
    run(first, *of_first, sync, range(SAVED_AT))
    state = save(first, *of_first, sync, folder)
    sync.flush()
    found = {"saved": whole(first)}
    sync.resume()
    run(first, *of_first, sync, range(SAVED_AT, STEPS))
    found["expected"] = end(first, sync)
    load(second, *of_second, folder)
    sync = attach(name, second, *of_second, mesh)
    sync.load_state_dict(state)
    run(second, *of_second, sync, range(SAVED_AT, STEPS))
    found["resumed"] = end(second, sync)
    load(alone, *of_alone, folder)
    found["loaded"] = whole(alone)
    run(alone, *of_alone, None, range(SAVED_AT, STEPS))  # with the state of its optimizer
    return {**found, "alone": whole(alone)}


def save_without_state(name: str, folder: Path) -> list[list[Tensor]]:
    """Returns the weights of a run whose optimizer has no state, and which is saved; and of one that is not saved."""
    weights = []
    for saves in (True, False):
        mesh = device_mesh()
        module = sharded(mesh["shards"])
        optimizer = SGD(module.parameters(), lr=0.1)
        sync = attach(name, module, optimizer, mesh)
        for begin in (0, 2):
            if saves:
                optimizer.zero_grad()
                save(module, optimizer, sync, folder / f"{name} {begin}")
            run(module, optimizer, sync, range(begin, begin + 2))
        weights.append(end(module, sync))
    return weights


IN_LOOPS = ("dear", "pipe_sgd", "selsync", "diloco", "streaming")


@pytest.fixture(scope="module")
def in_loops(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {name: partial(resume_in_a_loop, name, folder) for name in IN_LOOPS}
    cases |= {("without", name): partial(save_without_state, name, folder) for name in IN_LOOPS}
    return launch_sharded(cases, RANKS)


@pytest.mark.parametrize("name", IN_LOOPS)
def test_a_run_resumes_bit_for_bit_and_fsdp2_loads_its_checkpoint(name: str, in_loops: Outcomes) -> None:
    for found in in_loops[name]:
        assert equal(found["resumed"], found["expected"])
        assert equal(found["loaded"], found["saved"])
        assert all(value.isfinite().all() for value in found["alone"])


@pytest.mark.parametrize("name", IN_LOOPS)
def test_an_optimizer_without_a_state_is_saved(name: str, in_loops: Outcomes) -> None:
    """``get_state_dict`` makes the state that it misses by a step of zeros."""
    assert all(equal(*both) for both in in_loops["without", name])


# --- Accelerate's own, of both kinds; and what the user has sharded ---

#: Methods, kinds of checkpoint, and after how many steps they are saved. Pipe-SGD has no optimizer state after one.
IN_ACCELERATE = (
    ("dear", "SHARDED_STATE_DICT", 4),
    ("pipe_sgd", "FULL_STATE_DICT", 1),
    ("streaming", "SHARDED_STATE_DICT", 4),
    ("diloco", None, 4),
)


class Training:
    """A model that an Accelerator has prepared, with a method or, if ``name`` is None, by Accelerate alone (HSDP).

    Without a kind of checkpoint the user shards it, along a mesh of the user's own.
    """

    def __init__(self, name: str | None, kind: str | None) -> None:
        if kind is None:
            method, settings = SETTINGS[str(name)]
            self.accelerator: Any = PipeSyncAccelerator(PipeSyncPlugin(method, timeout_s=60, **settings))
            self.module = sharded(device_mesh()["shards"])
        else:
            self.accelerator = accelerator_of(name, plugin=fsdp_plugin(state_dict_type=kind))
            self.module = model()
        optimizer = adamw(self.module)
        prepared = self.accelerator.prepare(self.module, optimizer, StepLR(optimizer, 5, 0.5))
        self.network, self.optimizer, self.scheduler = prepared

    def run(self, steps: range) -> None:
        self.network.train()
        for step in steps:
            inputs, targets = batch(dist.get_rank(), step)
            self.optimizer.zero_grad()
            self.accelerator.backward((self.network(inputs) - targets).square().mean())
            self.optimizer.step()
            self.scheduler.step()

    def weights(self) -> list[Tensor]:
        self.network.eval()
        return whole(self.module)

    def end(self) -> list[Tensor]:
        weights = self.weights()
        self.accelerator.free_memory()
        return weights


def resume_in_accelerate(name: str, kind: str | None, saved_at: int, folder: Path) -> dict[str, Any]:
    """Saves a run that goes on, and resumes it; Accelerate alone loads its checkpoint, and the other way round."""
    folder, rest, further = folder / f"{name} {kind}", range(saved_at, STEPS), range(STEPS, STEPS + 2)
    found: dict[str, Any] = {}
    with fresh_state():
        first = Training(name, kind)
        first.run(range(saved_at))
        first.accelerator.save_state(str(folder / "method"))
        found["saved"] = first.weights()
        first.accelerator.save_model(first.network, str(folder / "model"))
        first.run(rest)
        found["expected"] = first.end()
    with fresh_state():
        second = Training(name, kind)
        second.run(range(1))  # something else, which loading replaces
        second.accelerator.load_state(str(folder / "method"))
        found["loaded"] = second.weights()
        second.run(rest)
        found["resumed"] = second.end()
    if kind is None:
        return found
    with fresh_state():
        alone = Training(None, kind)
        alone.accelerator.load_state(str(folder / "method"))
        found["loaded by FSDP2"] = alone.weights()
        alone.run(rest)
        found["FSDP2 goes on"] = alone.weights()
        alone.accelerator.save_state(str(folder / "alone"))
        alone.run(further)
        found["of FSDP2"] = alone.end()
    with fresh_state():
        third = Training(name, kind)
        third.accelerator.load_state(str(folder / "alone"))
        found["loaded of FSDP2"] = third.weights()
        third.run(further)
        found["goes on from FSDP2"] = third.end()
    return found


@pytest.fixture(scope="module")
def in_accelerate(folder: Path) -> Outcomes:
    cases = {saved: partial(resume_in_accelerate, *saved, folder) for saved in IN_ACCELERATE}
    return launch_sharded(cases, RANKS, init=False)


@pytest.mark.parametrize("saved", IN_ACCELERATE, ids=str)
def test_accelerate_resumes_bit_for_bit_and_loads_it(saved: Any, in_accelerate: Outcomes, folder: Path) -> None:
    """The saved model is a whole one; with DeAR Accelerate goes on as HSDP, with the optimizer's state, too."""
    name, kind, _ = saved
    pairs = [("loaded", "saved"), ("resumed", "expected")]
    if kind is not None:
        pairs += [("loaded by FSDP2", "saved"), ("loaded of FSDP2", "FSDP2 goes on")]
    if name == "dear":
        pairs += [("FSDP2 goes on", "expected"), ("goes on from FSDP2", "of FSDP2")]
    for found in in_accelerate[saved]:
        for key, expected in pairs:
            assert equal(found[key], found[expected]), (key, expected)
        assert not equal(found["saved"], found["expected"])
    directory = folder / f"{name} {kind}"
    files = [directory / "model" / "model.safetensors"]
    if kind == "SHARDED_STATE_DICT":
        merge_fsdp_weights(str(directory / "method" / "pytorch_model_fsdp_0"), str(directory / "merged"))
        files.append(directory / "merged" / "model.safetensors")
    for file in files:
        plain = model()
        plain.load_state_dict(load_file(file))
        assert equal(plain.parameters(), in_accelerate[saved][0]["saved"])
    if kind is None:
        optimizer = adamw(plain)
        optimizer.load_state_dict(torch.load(directory / "method" / "optimizer.bin", weights_only=True))
        assert all(state["exp_avg"].shape == value.shape for value, state in optimizer.state.items())


# --- other layouts: numbers of ranks, and of those that hold a replica; with one each rank has the whole model ---

OTHERS = [(4, 1), (2, 2), (6, 2)]
FEW = range(3)


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def moments_of(state: dict[str, Any]) -> list[Tensor]:
    """Returns what an optimizer's whole state has of each parameter; nothing, on the ranks that have none."""
    return [state["state"][index]["exp_avg"] for index in sorted(state["state"])] if state else []


def moments_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [whole_of(optimizer.state[one]["exp_avg"]) for one in optimizer.param_groups[0]["params"] if optimizer.state]


class Recording(Module):
    """It keeps the weights, and on rank 0 the optimizer's state, with which its training begins."""

    def configure_model(self) -> None:
        if self.device_mesh is None:
            self.layers = model()
        else:
            super().configure_model()

    def configure_optimizers(self) -> Any:
        return adamw(self)

    def on_train_start(self) -> None:
        self.loaded = whole(self)
        self.moments = moments_of(self.trainer.strategy.optimizer_state(self.optimizers().optimizer))


def in_a_trainer(name: str, folder: Path, size: int, resumes: bool) -> dict[str, Any]:
    """Saves after some steps of the first epoch, or resumes, and trains to its end."""
    method, settings = SETTINGS[name]
    strategy = make_strategy({"name": method, "timeout_s": 60, "ranks_per_replica": size, **settings})
    saves = [] if resumes else [ModelCheckpoint(folder, name, every_n_train_steps=len(FEW))]
    arguments: dict[str, Any] = {
        "max_steps": 2 * len(FEW) if resumes else len(FEW),
        "enable_checkpointing": not resumes,
    }
    fit = trainer(strategy, world_size(), folder, callbacks=saves, **arguments)
    module = Recording()
    fit.fit(module, DataLoader(data(), batch_size=1), ckpt_path=folder / f"{name}.ckpt" if resumes else None)
    return {"loaded": module.loaded, "moments": module.moments, "trained": whole(module)}


def in_fabric(name: str, folder: Path, size: int, resumes: bool) -> dict[str, Any]:
    method, settings = SETTINGS[name]
    layout = {"ranks_per_replica": size, "parallelize_fn": parallelize} if size > 1 else {}
    strategy = STRATEGY_REGISTRY[method]["strategy"](timeout_s=60, **settings, **layout)
    fabric = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
    fabric.launch()
    net, optimizer = fabric.setup(module := model(), adamw(module))
    state = {"model": net, "optimizer": optimizer}
    if resumes:
        fabric.load(folder / f"{name}.fabric", state)
    found = {"loaded": whole(net), "moments": moments_of(strategy.get_optimizer_state(optimizer.optimizer))}
    for step in FEW:
        inputs, targets = batch(fabric.global_rank, step)
        optimizer.zero_grad()
        fabric.backward((net(inputs) - targets).square().mean())
        optimizer.step()
    if not resumes:
        fabric.save(folder / f"{name}.fabric", state)
    with strategy.consolidated():
        found["trained"] = whole(net)
    strategy.teardown()
    return found


def in_a_loop(name: str, folder: Path, size: int, resumes: bool) -> dict[str, Any]:
    """Saves with torch.distributed.checkpoint, which gives each rank its shards when it loads."""
    mesh = init_device_mesh("cpu", (world_size() // size, size), mesh_dim_names=("replicas", "shards"))
    module = model() if size == 1 else sharded(mesh["shards"])
    optimizer = adamw(module)
    if resumes:
        load(module, optimizer, folder / f"{name}.dcp")
    found = {"loaded": whole(module), "moments": moments_in(optimizer)}
    sync = attach(name, module, optimizer, None if size == 1 else mesh)
    run(module, optimizer, sync, FEW)
    if not resumes:
        save(module, optimizer, sync, folder / f"{name}.dcp")
        sync.flush()
        with sync.given_back():
            found["saved moments"] = moments_in(optimizer)
    return {**found, "trained": end(module, sync)}


Run = Callable[[str, Path, int, bool], dict[str, Any]]
RUNS: list[tuple[Run, str]] = [
    *((in_a_trainer, name) for name in ("dear", "pipe_sgd", "selsync")),
    *((in_fabric, name) for name in ("dear", "selsync")),
    *((in_a_loop, name) for name in ("dear", "diloco")),
]


def resumed(run_: Callable[[], dict[str, Any]]) -> tuple[Any, list[str]]:
    """Returns what a run has, or what it raises, and the warnings of what it has lost."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = raised(lambda: found.update(run_()))
    return error or found, [str(one.message) for one in caught if "The checkpoint is of" in str(one.message)]


@pytest.fixture(scope="module")
def layouts(folder: Path) -> dict[Any, Outcomes]:
    found = {"saved": launch_sharded({key: partial(*key, folder, 2, False) for key in RUNS}, RANKS, init=False)}
    for ranks, size in OTHERS:
        cases = {key: partial(resumed, partial(*key, folder, size, True)) for key in RUNS}
        found[ranks, size] = launch_sharded(cases, ranks, init=False)
    return found


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("key", RUNS, ids=lambda key: f"{key[0].__name__} {key[1]}")
def test_another_layout_resumes_from_the_weights_and_the_optimizer(
    key: tuple[Run, str], layout: tuple[int, int], layouts: dict[Any, Outcomes], folder: Path
) -> None:
    """Bit for bit, and all ranks end equal; rank 0 says what is lost. What only its ranks have is refused."""
    (run_, name), (ranks, size) = key, layout
    saved, results = layouts["saved"][key][0], layouts[layout][key]
    there_are = f"2 x 2 ranks (replicas x ranks of each), and there are {ranks // size} x {size}"
    if name == "selsync":
        for outcome, _ in results:
            assert_refused({f"the state of {there_are} ranks": outcome})
        return
    for rank, (found, lost) in enumerate(results):
        assert isinstance(found, dict), found
        assert equal(found["loaded"], saved["trained"])
        assert not equal(found["trained"], found["loaded"])
        assert equal(found["trained"], results[0][0]["trained"])
        assert len(lost) == int(name != "dear" and run_ is not in_a_loop and rank == 0)
        assert all(message.startswith(f"The checkpoint is of {there_are}") for message in lost)
    if name == "dear":
        files: dict[Run, Callable[[], list[Tensor]]] = {
            in_a_trainer: lambda: moments_of(
                torch.load(folder / "dear.ckpt", weights_only=True)["optimizer_states"][0]
            ),
            in_fabric: lambda: moments_of(torch.load(folder / "dear.fabric", weights_only=True)["optimizer"]),
            in_a_loop: lambda: saved["saved moments"],
        }
        expected = files[run_]()
        assert all(value.any() for value in expected)
        assert equal(results[0][0]["moments"], expected)
