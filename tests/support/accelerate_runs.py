"""Trainings in Accelerate's words that are saved within an epoch, or resumed there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.support.lightning_models import Classifier, dataset, train_loader
from tests.support.models import OPTIMIZERS, Counter

METHODS: dict[str, dict[str, Any]] = {
    "dear": {"fusion": "buffer", "bucket_mb": 1e-4, "compression": "int8"},
    "selsync": {"delta": 0.05, "window": 3, "compression": "int8", "injection": (0.5, 0.5)},
    "pipe_sgd": {"staleness": 2, "compression": "int8"},
    "ea_pipe": {"split": (2,)},
}
SAVED_AT = (1, 3)  # epoch, and batches of it
LOSS = nn.functional.cross_entropy


def accelerator_of(method: str, **settings: Any) -> PipeSyncAccelerator:
    plugin = PipeSyncPlugin(method, **(settings or METHODS[method]))
    return PipeSyncAccelerator(plugin, dataloader_config=DataLoaderConfiguration(data_seed=11))


def end(accelerator: Any) -> None:
    """Ends the methods, and the watch over the job, which in a script ends with the process."""
    accelerator.free_memory()
    if (watch := getattr(accelerator, "_job_watch", None)) is not None:
        watch.close()


def train(method: str, folder: Path, resumed: bool, **settings: Any) -> tuple[Tensor, list[list[int]], Tensor]:
    """Trains two epochs, saving within the second; or what comes after that.

    Returns:
        the weights, the samples of each batch, and a random number that is drawn then.
    """
    accelerator, counter = accelerator_of(method, **settings), Counter()
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(100 * resumed + accelerator.process_index)
    model = Classifier(batch_norm=True, dropout=0.3)
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
    seen = []
    for current in range(epoch, 2):
        loader.set_epoch(current)
        batches = accelerator.skip_first_batches(loader, first) if first else loader
        for index, (indices, x, y) in enumerate(batches, start=first):
            seen.append(indices.tolist())
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
    end(accelerator)
    return weights, seen, number


def steps(accelerator: Accelerator, load: Path | None, num_steps: int, save: Path | None) -> tuple[Tensor, float]:
    """Trains from a checkpoint, if there is one, and saves another; returns the weights, and the learning rate."""
    torch.manual_seed(accelerator.process_index)
    model = Classifier(optimizer="adamw")
    optimizer = OPTIMIZERS["adamw"](model.model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    network, optimizer, scheduler = accelerator.prepare(model.model, optimizer, scheduler)
    try:
        if load is not None:
            accelerator.load_state(str(load))
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
    finally:  # also of a checkpoint that is refused
        end(accelerator)
    return model.weights(), rate
