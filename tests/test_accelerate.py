"""PipeSyncAccelerator on real processes: the same as the Trainer, step by step, and what is its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.harness import launch
from tests.lightning_models import Classifier, dataset, make_strategy, train_loader, trainer, val_loader
from tests.models import OPTIMIZERS

METHODS: dict[str, dict[str, Any]] = {
    "dear": {"bucket_mb": 1e-4, "fusion": "buffer"},
    "selsync": {"delta": 0.05, "window": 3},
    "pipe_sgd": {"warmup_steps": 3},
}
BATCHES = 8  # of an epoch, on each of two ranks


class Reproducible(Classifier):
    """Draws the same numbers in each step, wherever it is trained."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        torch.manual_seed(batch_idx)
        return super().training_step(batch, batch_idx)


def under_lightning(
    directory: Path, method: str, settings: dict[str, Any], module: dict[str, Any], **kwargs: Any
) -> Any:
    model = Reproducible(**module)
    run = trainer(make_strategy({"name": method, **settings}), 2, directory, max_epochs=3, **kwargs)
    run.fit(model, train_loader(), val_loader())
    return model.seen, [*model.validated_with, model.weights()]


def under_accelerate(
    seen: list[list[int]], method: str, settings: dict[str, Any], module: dict[str, Any], clip: float, accumulate: int
) -> list[Tensor]:
    accelerator = PipeSyncAccelerator(PipeSyncPlugin(method, **settings), gradient_accumulation_steps=accumulate)
    model, weights = Classifier(**module, scheduler=True), []
    [optimizer], [scheduler] = model.configure_optimizers()
    network, optimizer = accelerator.prepare(model.model, optimizer)
    for step, indices in enumerate(seen):
        _, x, y = dataset()[torch.tensor(indices)]
        with accelerator.accumulate(network):
            torch.manual_seed(step % BATCHES)
            accelerator.backward(nn.functional.cross_entropy(network(x), y))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(network.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % BATCHES == 0:
            network.eval()
            weights.append(model.weights())
            network.train()
            scheduler.step()
    accelerator.consolidate()
    weights.append(model.weights())
    accelerator.free_memory()
    return weights


CASES: list[tuple[dict[str, Any], float, int]] = [
    ({"optimizer": "sgd", "dropout": 0.2}, 0.5, 1),
    ({"optimizer": "adamw", "batch_norm": True, "dropout": 0.2}, 0.0, 2),
]


def both(method: str, directory: Path) -> list[Any]:
    outcomes = []
    for module, clip, accumulate in CASES:
        arguments = {"gradient_clip_val": clip or None, "accumulate_grad_batches": accumulate}
        settings = METHODS[method]
        seen, expected = under_lightning(directory, method, settings, {**module, "scheduler": True}, **arguments)
        actual = under_accelerate(seen, method, settings, module, clip, accumulate)
        accelerator = PipeSyncAccelerator(
            PipeSyncPlugin(method, **settings), dataloader_config=DataLoaderConfiguration(data_seed=0)
        )
        loader = accelerator.prepare_train_loader(train_loader())
        order = [indices.tolist() for _ in range(3) for indices, _, _ in loader]
        accelerator.free_memory()
        outcomes.append((seen, order, expected, actual))
    return outcomes


@pytest.mark.parametrize("method", list(METHODS))
def test_trains_as_the_trainer_does(method: str, tmp_path: Path) -> None:
    """24 steps, bit for bit, at every validation; with SelSync in the same order of the data, too."""
    ranks = launch(partial(both, method, tmp_path), 2, init=False)
    for (module, *_), *outcomes in zip(CASES, *ranks, strict=True):
        for seen, order, expected, actual in outcomes:
            assert len(seen) == 24
            assert len(expected) == len(actual) == 4
            for ours, theirs in zip(actual, expected, strict=True):
                assert torch.equal(ours, theirs), (module, (ours - theirs).abs().max())
            if method == "selsync":
                assert order == seen
        assert torch.equal(outcomes[0][3][-1], outcomes[1][3][-1])
        assert not torch.equal(outcomes[0][3][0], outcomes[0][3][-1])


def pipeline_on_both(directory: Path) -> Any:
    settings = {"split": (2,), "elastic_force": 0.3}
    seen, [*_, expected] = under_lightning(directory, "ea_pipe", settings, {"optimizer": "adamw", "dropout": 0.0})
    accelerator = PipeSyncAccelerator(
        PipeSyncPlugin("ea_pipe", **settings), dataloader_config=DataLoaderConfiguration(data_seed=3)
    )
    model = Classifier(optimizer="adamw")
    engine = accelerator.prepare_pipeline(
        model.model, nn.functional.cross_entropy, lambda parameters: OPTIMIZERS["adamw"](nn.ParameterList(parameters))
    )
    for indices in seen:
        _, x, y = dataset()[torch.tensor(indices)]
        engine.train_batch((x, y))
    accelerator.wait_for_everyone()
    order = [indices.tolist() for indices, _, _ in accelerator.prepare_train_loader(train_loader())]
    weights, metrics = model.weights(), accelerator.metrics()
    accelerator.free_memory()
    return expected, weights, order, metrics


def test_pipeline_trains_as_in_the_trainer(tmp_path: Path) -> None:
    """Bit for bit on every rank, and every rank loads the same batches."""
    first, second = launch(partial(pipeline_on_both, tmp_path), 2, init=False)
    for expected, weights, order, metrics in (first, second):
        assert torch.equal(weights, expected)
        assert order == first[2]
        assert metrics["ea_pipe/mib_sent"] > 0
    assert sorted(index for indices in first[2] for index in indices) == list(range(64))
