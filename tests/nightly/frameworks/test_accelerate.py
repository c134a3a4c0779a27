"""The order of the training data with PipeSyncAccelerator."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from accelerate.utils import DataLoaderConfiguration

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.support.harness import on_ranks
from tests.support.lightning_models import SAMPLES, Classifier, train_loader, trainer

EPOCHS = 2


def order_of(method: str, data_seed: int) -> list[list[int]]:
    """Returns the samples of each batch of this rank."""
    configuration = DataLoaderConfiguration(data_seed=data_seed)
    accelerator = PipeSyncAccelerator(PipeSyncPlugin(method), dataloader_config=configuration)
    loader = accelerator.prepare_train_loader(train_loader())
    order = [indices.tolist() for _ in range(EPOCHS) for indices, _, _ in loader]
    accelerator.free_memory()
    return order


def orders(directory: Path) -> dict[str, list[list[int]]]:
    model = Classifier()
    trainer("selsync", 2, directory, max_epochs=EPOCHS).fit(model, train_loader())
    return {"Trainer": model.seen, "selsync": order_of("selsync", 0), "ea_pipe": order_of("ea_pipe", 3)}


def test_order_of_the_data(tmp_path: Path) -> None:
    """SelDP's is the Trainer's, and each rank sees all samples; of a pipeline all ranks load the same batches."""
    one, other = on_ranks(partial(orders, tmp_path), 2, init=False)
    for of_rank in (one, other):
        assert of_rank["selsync"] == of_rank["Trainer"]
    assert one["selsync"] != other["selsync"]
    assert one["ea_pipe"] == other["ea_pipe"]
    for epoch in range(EPOCHS):
        batches = one["ea_pipe"][epoch * SAMPLES // 4 : (epoch + 1) * SAMPLES // 4]
        assert sorted(index for indices in batches for index in indices) == list(range(SAMPLES))
