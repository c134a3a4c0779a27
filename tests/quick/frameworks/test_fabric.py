"""Fabric's calls in any order: models and optimizers that are set up together, apart, late or not at all."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from lightning_pipesync.fabric import PipeSGDFabricStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.fabric_runs import NAMES, SYNCHRONOUS, ended, launched, scaling
from tests.support.harness import assert_raised, assert_refused, raised
from tests.support.lightning_models import LOCAL
from tests.support.models import assert_same, batch, loss, seeded_mlp, state


def train_two_models(name: str) -> dict[str, Tensor]:
    """One of them computes its gradients in a closure; a third one is not trained."""
    fabric = launched(name, SYNCHRONOUS.get(name))
    rank = fabric.global_rank
    models = [seeded_mlp(seed + 3 * rank) for seed in range(3)]
    teacher = fabric.setup_module(models[2])
    first, first_optimizer = fabric.setup(models[0], SGD(models[0].parameters(), lr=0.1))
    second, second_optimizer = fabric.setup(models[1], SGD(models[1].parameters(), lr=0.1))

    def compute(model: nn.Module, step: int) -> Tensor:
        model.zero_grad()
        x, _ = batch(step, rank)
        with torch.no_grad():
            target = teacher(x)
        distance = nn.functional.mse_loss(model(x), target)
        fabric.backward(distance)
        return distance

    for i in range(3):
        compute(first, i)
        first_optimizer.step()
        assert second_optimizer.step(lambda step=i: compute(second, step)) > 0
    return state(nn.ModuleList(models))


def train_a_part_later(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The second layer has an optimizer from the second step on, also where the first one's is Adam."""
    fabric = launched(name, SYNCHRONOUS[name])
    model, expected = seeded_mlp(), seeded_mlp()
    (first, second), reference = (
        [AdamW(one[0].parameters(), lr=0.01), SGD(one[2].parameters(), lr=0.1)] for one in (model, expected)
    )
    wrapped, *optimizers = fabric.setup(model, first)
    for i in range(4):
        if i == 1:
            optimizers.append(fabric.setup_optimizers(second))
        loss(wrapped, i, fabric.global_rank).backward()
        (sum(loss(expected, i, rank) for rank in range(2)) / 2).backward()
        for optimizer in [*optimizers, *reference[: len(optimizers)]]:
            optimizer.step()
        wrapped.zero_grad()
        expected.zero_grad()
    with fabric.strategy.consolidated():
        return state(model), state(expected)


def validate_and_save(folder: Path) -> dict[str, Any]:
    """Replicas part after the first step; who looks at the weights finds their average, and training goes on."""
    fabric = launched("selsync", LOCAL)
    model = seeded_mlp(batch_norm=True)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    seen = []
    for i in range(4):
        fabric.backward(loss(model, i, fabric.global_rank))
        optimizer.step()
        before = state(model)
        with fabric.strategy.consolidated():
            seen.append(state(model))
            fabric.save(folder / "within", {"model": model, "optimizer": optimizer})
            assert_same(state(model), seen[-1])
        fabric.save(folder / "outside", {"model": model, "optimizer": optimizer})
        assert_same(state(model), before)
    with pytest.raises(KeyError), fabric.strategy.consolidated():
        raise KeyError("a bug in the validation")
    assert_same(state(model), before)
    return {"own": before, "seen": seen}


def drop(name: str) -> tuple[bool, int]:
    """Whether a model is there after its Fabric and its optimizer were dropped, and how many threads more there are."""
    before = threading.active_count()
    fabric, module = Fabric(accelerator="cpu", devices=2, strategy=name), seeded_mlp()
    fabric.launch()
    model, optimizer = fabric.setup(module, SGD(module.parameters(), lr=0.1))
    fabric.strategy.prepare_train_loader(DataLoader(torch.ones(4, 4), 2))  # type: ignore[attr-defined]
    for i in range(2):
        fabric.backward(loss(model, i, fabric.global_rank))
        optimizer.step()
    kept = weakref.ref(module)
    fabric.strategy._job_watch.close()  # type: ignore[attr-defined]
    del fabric, module, model, optimizer
    for _ in range(2):  # the first one ends the method, which has hooks on the model until then
        gc.collect()
    return kept() is not None, threading.active_count() - before


#: What is named, or said, where Fabric is used wrongly.
WRONG = ("No model that was set up", "fused=False", "norm_type=inf", "'pipesync'", "was not set up", "called directly")


def do_it_wrong(kind: str) -> tuple[str, str] | None:
    fused = kind == "fused=False"
    fabric = launched("dear", plugins=[scaling(2.0**10)] if fused else [])
    model = seeded_mlp()
    optimizer, late = (SGD(part.parameters(), lr=0.1, fused=fused) for part in (model[0], model[2]))
    if kind == "No model that was set up":
        return raised(lambda: fabric.setup_optimizers(optimizer))
    if fused:
        return raised(lambda: fabric.setup(model, optimizer))
    model, optimizer = fabric.setup(model, optimizer)
    fabric.backward(loss(model, 0, fabric.global_rank))
    actions = {
        "norm_type=inf": lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=float("inf")),
        "'pipesync'": lambda: fabric.save("nowhere", {"model": model, "pipesync": 1}),
        "was not set up": lambda: fabric.strategy.method_of(late),
        "called directly": optimizer.optimizer.step,
    }
    return raised(actions[kind])


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        (train_two_models, name): partial(ended, train_two_models, name) for name in ["ddp", *NAMES]
    }
    cases |= {(train_a_part_later, name): partial(ended, train_a_part_later, name) for name in NAMES}
    cases |= {kind: partial(ended, do_it_wrong, kind) for kind in WRONG}
    cases |= {(drop, name): partial(drop, name) for name in NAMES}
    return launch_cases({**cases, "validation": partial(ended, validate_and_save, folder)}, 2, init=False)


@pytest.mark.parametrize("name", NAMES)
def test_several_models(name: str, trained: Outcomes) -> None:
    for weights, expected in zip(trained[train_two_models, name], trained[train_two_models, "ddp"], strict=True):
        assert_same(weights, expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_may_be_set_up_later(name: str, trained: Outcomes) -> None:
    outcomes = trained[train_a_part_later, name]
    for weights, expected in outcomes:
        assert_same(weights, outcomes[0][0])
        torch.testing.assert_close(weights, expected)


def test_validation(trained: Outcomes, folder: Path) -> None:
    one, other = trained["validation"]
    for average, same in zip(one["seen"], other["seen"], strict=True):
        assert_same(average, same)
    for name, average in one["seen"][-1].items():
        if average.is_floating_point():
            torch.testing.assert_close(average, (one["own"][name] + other["own"][name]) / 2)
    assert not torch.equal(one["own"]["0.weight"], other["own"]["0.weight"])
    for file in ("within", "outside"):
        assert_same(torch.load(folder / file, weights_only=True)["model"], one["seen"][-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_dropped_is_not_kept(name: str, trained: Outcomes) -> None:
    """Without ``teardown()``; and the threads of its method end."""
    assert trained[drop, name] == [(False, 0)] * 2


@pytest.mark.parametrize("kind", WRONG)
def test_what_would_go_wrong_is_named(kind: str, trained: Outcomes) -> None:
    for outcome in trained[kind]:
        if kind == "called directly":
            assert_raised(outcome, "RuntimeError", "step() was called directly", "fabric.setup()")
        else:
            assert_refused({kind: outcome})


def test_what_fabric_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"drain\(\)"):
        PipeSGDFabricStrategy(drain=True)
    with pytest.raises(ValueError, match=r"EAPipe.*train_batch"):
        Fabric(accelerator="cpu", devices=2, strategy="ea_pipe")
