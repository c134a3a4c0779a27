"""PipeSyncAccelerator saves, resumes, skips batches and ends."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipesync.accelerate import PipeSyncAccelerator
from tests.support.accelerate_runs import accelerator_of, train
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import raised
from tests.support.lightning_models import Classifier
from tests.support.models import OPTIMIZERS, assert_same

#: Each in another order of the data.
RESUMED = ("dear", "selsync", "ea_pipe")


def end_with_own_weights(folder: Path) -> tuple[Tensor, Any]:
    """Saves without the replicas, and ends: then each process has its model alone. It cannot begin anew."""
    accelerator = accelerator_of("selsync", delta=1e9, checkpoint_replicas=False)
    model = Classifier()
    network, optimizer = accelerator.prepare(model.model, OPTIMIZERS["sgd"](model.model))
    for step in range(4):
        optimizer.zero_grad()
        accelerator.backward(network(torch.full((4, 6), float(step + accelerator.process_index))).square().mean())
        optimizer.step()
        if step == 2:
            accelerator.save_state(str(folder))
            accelerator.save_model(network, str(folder / "model"))
    accelerator.end_training()
    return model.weights(), raised(lambda: PipeSyncAccelerator(accelerator.pipesync))


def drop() -> tuple[list[bool], int]:
    """Which models are there after trainings whose Accelerators were dropped, and how many threads more there are."""
    models = []
    before = threading.active_count()
    for method in ("dear", "selsync"):
        accelerator = accelerator_of(method, timeout_s=60)
        model = torch.nn.Linear(4, 2)
        network, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
        accelerator.prepare_train_loader(DataLoader(torch.ones(4, 4), 2))  # type: ignore[arg-type]
        for _ in range(2):
            optimizer.zero_grad()
            accelerator.backward(network(torch.ones(2, 4)).sum())
            optimizer.step()
        models.append(weakref.ref(model))
        accelerator._job_watch.close()  # type: ignore[union-attr]
        del accelerator, model, network, optimizer
        gc.collect()
    return [model() is not None for model in models], threading.active_count() - before


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        (method, resumed): partial(train, method, folder / method, resumed)
        for method in RESUMED
        for resumed in (False, True)
    }
    cases["end"] = partial(end_with_own_weights, folder / "end")
    cases = {"drop": drop, **cases}  # before the process group is destroyed
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("method", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(method: str, trained: Outcomes, folder: Path) -> None:
    """Bit for bit, within an epoch: weights, residuals of codecs, injected rows, dropout, and the next batch."""
    wholes = trained[method, False]
    for (weights, seen, number), resumed in zip(wholes, trained[method, True], strict=True):
        assert torch.equal(weights, resumed[0]), (weights - resumed[0]).abs().max()
        assert torch.equal(weights, wholes[0][0])
        assert resumed[1] == seen[-len(resumed[1]) :] != []
        assert torch.equal(number, resumed[2])
    assert (folder / method / "pipesync_1.bin").exists()


def test_the_end_consolidates_and_replicas_may_be_left_out(trained: Outcomes, folder: Path) -> None:
    (first, error), (second, _) = trained["end"]
    assert torch.equal(first, second)
    assert "has destroyed it" in error[1]
    assert "call accelerator.free_memory()" in error[1]
    state, model = (load_file(path / "model.safetensors") for path in (folder / "end", folder / "end" / "model"))
    assert state.keys() == model.keys()
    assert_same(model, state)
    assert not list((folder / "end").glob("pipesync_*"))


def test_a_model_that_is_dropped_is_not_kept(trained: Outcomes) -> None:
    """Without ``free_memory()``; and the threads of its method end."""
    assert trained["drop"] == [([False, False], 0)] * 2
