"""Unusual checkpoints of PipeSyncAccelerator: what a run that goes on from one is, or why there is none."""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tests.support.accelerate_runs import LOSS, accelerator_of, end, steps, train
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lightning_models import SAMPLES, Classifier, dataset
from tests.support.models import OPTIMIZERS

#: Prepared again, and then saved.
AGAIN = ("dear", "selsync", "pipe_sgd")
#: Pipelines side by side: two of two stages.
AVERAGES: dict[str, dict[str, Any]] = {"gradients": {}, "elastic": {"average": "elastic", "average_period": 2}}


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
        end(accelerator)
    return scales[0], scales[1]


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
    end(accelerator)
    return outcomes


def overwrite(folder: Path) -> tuple[Tensor, Tensor, list[str]]:
    """SelSync saves, plain Accelerate saves over it, SelSync loads that."""
    steps(accelerator_of("selsync", delta=1e9), None, 3, folder)
    weights, _ = steps(Accelerator(cpu=True), None, 2, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded, _ = steps(accelerator_of("selsync", delta=1e9), folder, 0, None)
    return weights, loaded, [str(one.message) for one in caught]


def save_with_pipe_sgd(folder: Path) -> None:
    """With residuals of a codec, and without."""
    steps(accelerator_of("pipe_sgd"), None, 3, folder / "residuals")
    steps(accelerator_of("pipe_sgd", timeout_s=60), None, 3, folder / "in flight")


def load_with_others(folder: Path) -> tuple[tuple[str, str] | None, list[str]]:
    """Goes on with another number of processes."""
    refused = raised(lambda: steps(accelerator_of("pipe_sgd"), folder / "residuals", 0, None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(accelerator_of("pipe_sgd", timeout_s=60), folder / "in flight", 2, None)
    return refused, [str(one.message) for one in caught if "The checkpoint is" in str(one.message)]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {method: partial(save_again, method, folder / method) for method in AGAIN}
    cases |= {how: partial(how, folder / how.__name__) for how in (overwrite, scales_that_are_resumed)}
    cases[save_with_pipe_sgd] = partial(save_with_pipe_sgd, folder)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("method", AGAIN)
def test_models_that_are_prepared_again_and_files_that_are_not_there(
    method: str, trained: Outcomes, folder: Path
) -> None:
    for outcomes in trained[method]:
        assert "folder does not exist" in outcomes["nowhere"][1]
        assert_refused({"Not all of the 2 processes find what they need": outcomes["incomplete"]})
        assert outcomes["loaded"]
    assert (folder / method / "model.safetensors").exists()


def test_a_checkpoint_that_another_one_has_overwritten(trained: Outcomes) -> None:
    for weights, loaded, messages in trained[overwrite]:
        assert torch.equal(loaded, weights)
        assert any("is of other weights than those that were loaded" in message for message in messages)


def test_each_rank_resumes_with_its_own_loss_scale(trained: Outcomes) -> None:
    """Where ranks skip steps on their own: Accelerate's checkpoint has the scale of one rank."""
    assert trained[scales_that_are_resumed] == [(1024.0, 1024.0), (512.0, 512.0)]


def test_another_number_of_processes(trained: Outcomes, folder: Path) -> None:
    assert trained[save_with_pipe_sgd] == [None, None]
    for rank, (refused, messages) in enumerate(launch_cases({0: partial(load_with_others, folder)}, 3, init=False)[0]):
        assert_refused({"state of 2 ranks, and there are 3": refused})
        assert len(messages) == (rank == 0)
        assert all("2 ranks, and there are 3: gradients in flight are dropped" in message for message in messages)


def assert_resumed(wholes: list[Any], resumed: list[Any]) -> None:
    for (weights, seen, _), (again, rest, _) in zip(wholes, resumed, strict=True):
        assert torch.equal(weights, again)
        assert torch.equal(weights, wholes[0][0])
        assert rest == seen[-len(rest) :] != []


def test_pipelines_side_by_side_resume(folder: Path) -> None:
    """The ranks of a pipeline load the same batches, and the pipelines divide the samples of an epoch."""
    settings: dict[str, Any] = {"split": (2,), "num_pipelines": 2}
    cases = {
        (average, resumed): partial(train, "ea_pipe", folder / average, resumed, **AVERAGES[average], **settings)
        for average in AVERAGES
        for resumed in (False, True)
    }
    outcomes = launch_cases(cases, 4, init=False)
    for average in AVERAGES:
        wholes = outcomes[average, False]
        assert_resumed(wholes, outcomes[average, True])
        seen = [batches for _, batches, _ in wholes]
        assert seen[0] == seen[1]
        assert seen[2] == seen[3]
        assert sorted(i for rank in (0, 2) for batch in seen[rank][:8] for i in batch) == list(range(SAMPLES))


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
        end(accelerator)
    return trained


def test_a_pipeline_in_one_process_resumes(tmp_path: Path) -> None:
    [(uninterrupted, resumed)] = on_ranks(train_virtual_stages, 1, tmp_path, init=False)
    assert torch.equal(uninterrupted, resumed)
    assert not torch.equal(resumed, Classifier().weights())
