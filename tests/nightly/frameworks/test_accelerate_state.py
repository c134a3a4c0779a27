"""Checkpoints of PipeSyncAccelerator: what a run that goes on from one is, and where else it can be loaded."""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lightning_models import Classifier, dataset, train_loader
from tests.support.models import OPTIMIZERS, Counter

METHODS: dict[str, dict[str, Any]] = {
    "dear": {"fusion": "buffer", "bucket_mb": 1e-4, "compression": "int8"},
    "selsync": {"delta": 0.05, "window": 3, "compression": "int8", "injection": (0.5, 0.5)},
    "pipe_sgd": {"staleness": 2, "compression": "int8"},
    "ea_pipe": {"split": (2,)},
}
#: Each in another order of the data.
RESUMED = ("dear", "selsync", "ea_pipe")
#: Prepared again, and then saved.
AGAIN = ("dear", "selsync", "pipe_sgd")
SAVED_AT = (1, 3)  # epoch, and batches of it
LOSS = nn.functional.cross_entropy


def accelerator_of(method: str, **settings: Any) -> PipeSyncAccelerator:
    plugin = PipeSyncPlugin(method, **(settings or METHODS[method]))
    return PipeSyncAccelerator(plugin, dataloader_config=DataLoaderConfiguration(data_seed=11))


def scales_that_are_resumed(folder: Path) -> tuple[float, float]:
    """The loss scale of this rank in a checkpoint after an overflow on rank 1 alone; and with which it goes on."""
    scales = []
    for resumes in (False, True):
        accelerator = accelerator_of("local_sgd", period=4)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # without a GPU Accelerate makes none
        model = nn.Linear(2, 2)
        accelerator.prepare(model, OPTIMIZERS["sgd"](model))
        assert accelerator.scaler.scale(torch.zeros(())) == 0  # which makes its state
        if resumes:
            accelerator.load_state(str(folder))
        else:
            accelerator.scaler.update(1024.0 / 2**accelerator.process_index)
            accelerator.save_state(str(folder))
        scales.append(accelerator.scaler.get_scale())
        accelerator.free_memory()
    return scales[0], scales[1]


def train(method: str, folder: Path, resumed: bool) -> tuple[Tensor, Tensor]:
    """Trains two epochs, saving within the second; or what comes after that. Returns weights, and a random number."""
    accelerator, counter = accelerator_of(method), Counter()
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(100 * resumed + accelerator.process_index)
    model = Classifier(optimizer="adamw", batch_norm=method != "ea_pipe", dropout=0.3)
    loader = accelerator.prepare_train_loader(train_loader(drop_last=True))
    if method == "ea_pipe":
        engine = accelerator.prepare_pipeline(
            model.model, LOSS, lambda parameters: OPTIMIZERS["adamw"](nn.ParameterList(parameters))
        )
    else:
        optimizer = OPTIMIZERS["adamw"](model.model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        network, optimizer, scheduler = accelerator.prepare(model.model, optimizer, scheduler)
    epoch, first = SAVED_AT if resumed else (0, 0)
    if resumed:
        accelerator.load_state(str(folder))
    for current in range(epoch, 2):
        loader.set_epoch(current)
        batches = accelerator.skip_first_batches(loader, first) if first else loader
        for index, (_, x, y) in enumerate(batches, start=first):
            if method == "ea_pipe":
                engine.train_batch((x, y))
            else:
                optimizer.zero_grad()
                accelerator.backward(LOSS(network(x), y))
                optimizer.step()
                scheduler.step()
            counter.steps += 1
            if not resumed and (current, index + 1) == SAVED_AT:
                accelerator.save_state(str(folder))
        first = 0
    accelerator.consolidate()
    assert counter.steps == 2 * len(loader)
    weights, number = model.weights(), torch.rand(())
    accelerator.free_memory()
    return weights, number


def train_virtual_stages(folder: Path) -> list[Tensor]:
    """Returns the weights of a pipeline in one process after six batches, and again resumed after three of them."""
    trained = []
    for first in (0, 3):
        accelerator, model = accelerator_of("ea_pipe"), Classifier(dropout=0.3)
        engine = accelerator.prepare_pipeline(
            model.model, LOSS, lambda parameters: OPTIMIZERS["adamw"](nn.ParameterList(parameters)), virtual_stages=2
        )
        if first:
            accelerator.load_state(str(folder))
        for step in range(first, 6):
            engine.train_batch(dataset()[torch.arange(4) + 4 * step][1:])
            if step == 2:
                accelerator.save_state(str(folder))
        accelerator.consolidate()
        trained.append(model.weights())
        accelerator.free_memory()
    return trained


def steps(accelerator: Accelerator, folder: Path | None, num_steps: int, save: Path | None) -> tuple[Tensor, float]:
    """Trains from a checkpoint, if there is one, and saves another."""
    torch.manual_seed(accelerator.process_index)
    model = Classifier(optimizer="adamw")
    optimizer = OPTIMIZERS["adamw"](model.model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    network, optimizer, scheduler = accelerator.prepare(model.model, optimizer, scheduler)
    if folder is not None:
        accelerator.load_state(str(folder))
    for step in range(num_steps):
        _, x, y = dataset()[torch.arange(4) + 8 * step + 4 * accelerator.process_index]
        optimizer.zero_grad()
        accelerator.backward(LOSS(network(x), y))
        optimizer.step()
        scheduler.step()
    if save is not None:
        accelerator.save_state(str(save))
        accelerator.save_model(network, str(save / "model"))
    accelerator.wait_for_everyone()
    rate = float(optimizer.param_groups[0]["lr"])
    accelerator.free_memory()
    return model.weights(), rate


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def save_again(method: str, folder: Path) -> dict[str, Any]:
    """Trains a model with tied weights, frees it, prepares it again, and saves it; then loads in ways that fail."""
    accelerator = accelerator_of(method, timeout_s=60)
    model = Tied()
    for _ in range(2):
        network, optimizer = accelerator.prepare(model, OPTIMIZERS["adamw"](model))
        for step in range(3):
            accelerator.backward(network(torch.ones(2, 6) * (step + accelerator.process_index)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.return_optimizer_states()
        accelerator.free_memory()
    network, optimizer = accelerator.prepare(model, OPTIMIZERS["adamw"](model))
    accelerator.save_state(str(folder))
    saved = model.first.weight.detach().clone()
    accelerator.wait_for_everyone()
    outcomes = {"nowhere": raised(lambda: accelerator.load_state(str(folder / "nowhere")))}
    accelerator.backward(network(torch.ones(2, 6) * accelerator.process_index).square().sum())  # as if nothing was
    optimizer.step()
    # Each process has a folder of its own, and one of them lacks its file.
    mine = folder.with_name(f"{folder.name} of {accelerator.process_index}")
    shutil.copytree(folder, mine)
    if accelerator.process_index == 1:
        (mine / "pipesync_1.bin").unlink()
    outcomes["incomplete"] = raised(lambda: accelerator.load_state(str(mine)))
    accelerator.load_state(str(folder))
    outcomes["loaded"] = torch.equal(model.first.weight, saved)
    accelerator.free_memory()
    return outcomes


def overwrite(folder: Path) -> tuple[Tensor, Tensor, list[str]]:
    """SelSync saves, plain Accelerate saves over it, SelSync loads that."""
    steps(accelerator_of("selsync", delta=1e9), None, 3, folder)
    weights, _ = steps(Accelerator(cpu=True), None, 2, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded, _ = steps(accelerator_of("selsync", delta=1e9), folder, 0, None)
    return weights, loaded, [str(one.message) for one in caught]


def load_with_others(directory: Path) -> tuple[tuple[str, str] | None, list[str]]:
    """Goes on with another number of processes: with residuals of a codec, and without."""
    refused = raised(lambda: steps(accelerator_of("pipe_sgd"), directory / "residuals", 0, None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(accelerator_of("pipe_sgd", timeout_s=60), directory / "in flight", 2, None)
    return refused, [str(one.message) for one in caught if "The checkpoint is" in str(one.message)]


def save_with_pipe_sgd(directory: Path) -> None:
    """With residuals of a codec, and without."""
    steps(accelerator_of("pipe_sgd"), None, 3, directory / "residuals")
    steps(accelerator_of("pipe_sgd", timeout_s=60), None, 3, directory / "in flight")


def interchange(directory: Path) -> dict[str, Any]:
    """Trains by DDP and by DeAR; loads DeAR's checkpoint with another method, and with other settings."""
    return {
        "ddp": steps(Accelerator(cpu=True), None, 3, directory / "ddp"),
        "dear": steps(accelerator_of("dear", timeout_s=60), None, 3, directory / "dear"),
        "selsync": steps(accelerator_of("selsync", timeout_s=60), directory / "dear", 0, None),
        "settings": raised(lambda: steps(accelerator_of("dear", compression="int8"), directory / "dear", 0, None)),
    }


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        (method, resumed): partial(train, method, folder / method, resumed)
        for method in RESUMED
        for resumed in (False, True)
    }
    cases |= {("again", method): partial(save_again, method, folder / f"{method} again") for method in AGAIN}
    cases |= {how: partial(how, folder / how.__name__) for how in (overwrite, save_with_pipe_sgd, interchange)}
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("method", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(method: str, trained: Outcomes, folder: Path) -> None:
    """Bit for bit, within an epoch: weights, residuals of codecs, injected rows, dropout."""
    whole = trained[method, False]
    for (uninterrupted, number), (resumed, other) in zip(whole, trained[method, True], strict=True):
        assert torch.equal(uninterrupted, resumed), (uninterrupted - resumed).abs().max()
        assert torch.equal(number, other)
        assert torch.equal(uninterrupted, whole[0][0])
    assert (folder / method / "pipesync_1.bin").exists()


def test_each_rank_resumes_with_its_own_loss_scale(tmp_path: Path) -> None:
    """Where ranks skip steps on their own: Accelerate's checkpoint has the scale of one rank."""
    outcomes = on_ranks(partial(scales_that_are_resumed, tmp_path / "checkpoint"), 2, init=False)
    assert outcomes == [(1024.0, 1024.0), (512.0, 512.0)]


def test_a_pipeline_in_one_process_resumes(tmp_path: Path) -> None:
    [(uninterrupted, resumed)] = on_ranks(train_virtual_stages, 1, tmp_path, init=False)
    assert torch.equal(uninterrupted, resumed)
    assert not torch.equal(resumed, Classifier().weights())


@pytest.mark.parametrize("method", AGAIN)
def test_unusual_checkpoints(method: str, trained: Outcomes, folder: Path) -> None:
    """Tied weights, a model that was prepared again, checkpoints that are not there, or incomplete."""
    for outcomes in trained["again", method]:
        assert "folder does not exist" in outcomes["nowhere"][1]
        assert_refused({"Not all of the 2 processes find what they need": outcomes["incomplete"]})
        assert outcomes["loaded"]
    assert (folder / f"{method} again" / "model.safetensors").exists()


def test_a_checkpoint_that_another_one_has_overwritten(trained: Outcomes) -> None:
    for weights, loaded, messages in trained[overwrite]:
        assert torch.equal(loaded, weights)
        assert any("is of other weights than those that were loaded" in message for message in messages)


def test_another_number_of_processes(trained: Outcomes, folder: Path) -> None:
    assert trained[save_with_pipe_sgd] == [None, None]
    lost = "gradients in flight are dropped, and the pipeline fills anew."
    outcomes = on_ranks(load_with_others, 3, folder / save_with_pipe_sgd.__name__, init=False)
    for rank, (refused, messages) in enumerate(outcomes):
        assert_refused({"The checkpoint holds the state of 2 ranks, and there are 3.": refused})
        assert messages == ["The checkpoint is of 2 ranks, and there are 3: " + lost] * (rank == 0)


def test_checkpoints_are_accelerates_own(trained: Outcomes, folder: Path) -> None:
    """Two steps of the scheduler for each of three, and the same files; any method loads the weights."""
    for outcomes in trained[interchange]:
        weights, rate = outcomes["ddp"]
        assert torch.equal(outcomes["dear"][0], weights)
        assert torch.equal(outcomes["selsync"][0], weights)
        assert outcomes["dear"][1] == rate == 0.01 * 0.5
        assert_refused({"compression": outcomes["settings"]})
    plain, dear = (
        load_file(folder / interchange.__name__ / kind / "model" / "model.safetensors") for kind in ("ddp", "dear")
    )
    assert plain.keys() == dear.keys()
    assert all(torch.equal(plain[name], dear[name]) for name in plain)


def end_with_own_weights(folder: Path) -> Tensor:
    """Saves without the replicas, and ends: then each process has its model alone."""
    accelerator = accelerator_of("selsync", delta=1e9, checkpoint_replicas=False)
    model = Classifier().model
    network, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((4, 6), float(step + accelerator.process_index))
        accelerator.backward(network(x).square().mean())
        optimizer.step()
        if step == 2:
            accelerator.save_state(str(folder))
    accelerator.end_training()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_end_consolidates_and_replicas_may_be_left_out(tmp_path: Path) -> None:
    assert torch.equal(*on_ranks(end_with_own_weights, 2, tmp_path, init=False))
    assert (tmp_path / "model.safetensors").exists()
    assert not list(tmp_path.glob("pipesync_*"))
