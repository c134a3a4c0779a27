"""Pipelines side by side in the Trainer: two of two stages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.support.case_table import Outcomes, launch_cases
from tests.support.ea_pipe_runs import average_elastically
from tests.support.harness import on_ranks
from tests.support.lightning_models import Classifier, dataset, fit, make_strategy, train_loader, trainer, val_loader
from tests.support.models import OPTIMIZERS

SETTINGS = {"name": "ea_pipe", "split": (2,), "num_pipelines": 2}
ELASTIC = {**SETTINGS, "algorithm": "1f1b", "average": "elastic", "average_period": 3}
ALONE: dict[str, Any] = {"num_pipelines": 1, "average": "gradients"}
MODULE = {"optimizer": "adamw", "batch_norm": True, "dropout": 0.3}


def fit_elastic(folder: Path, max_epochs: int, path: Path | None = None, devices: int = 4, **settings: Any) -> Any:
    """The weights and the metrics; saves a checkpoint after each epoch, if it resumes from none."""
    model = Classifier(**MODULE)
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {} if path else {"enable_checkpointing": True, "callbacks": [saving]}
    strategy = make_strategy({**ELASTIC, **settings})
    run = trainer(strategy, devices, folder, max_epochs=max_epochs, limit_train_batches=5, **options)
    run.fit(model, train_loader(), val_loader(), ckpt_path=path)
    return model.weights(), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {"gradients": partial(fit, folder, SETTINGS, max_epochs=2)}
    cases["uninterrupted"] = partial(fit_elastic, folder, 2)
    cases |= {epochs: partial(fit_elastic, folder, epochs, folder / "epoch=0.ckpt") for epochs in (1, 2)}
    cases["other"] = partial(fit_elastic, folder, 1, folder / "epoch=0.ckpt", **ALONE, split=(2, 3, 4))
    return launch_cases(cases, 4, init=False)


def test_pipelines_divide_the_samples_and_train_as_one(trained: Outcomes) -> None:
    outcomes = trained["gradients"]
    of_pipelines = outcomes[0]["seen"], outcomes[2]["seen"]  # the last stages
    for seen in of_pipelines:
        assert len(seen) == 2 * 8
    for epoch in (slice(0, 8), slice(8, 16)):
        indices = [index for seen in of_pipelines for batch in seen[epoch] for index in batch]
        assert sorted(indices) == list(range(len(dataset())))

    def update(replica: Classifier, optimizer: torch.optim.Optimizer, t: int) -> None:
        optimizer.zero_grad()
        for seen in of_pipelines:
            _, x, y = dataset()[torch.tensor(seen[t])]
            (nn.functional.cross_entropy(replica.model(x), y) / 2).backward()
        optimizer.step()

    master = average_elastically(Classifier, OPTIMIZERS["sgd"], update, num_updates=16, force=0.5)
    _, x, y = dataset()[:]
    for outcome in outcomes:
        torch.testing.assert_close(outcome["weights"], master.weights())
        assert torch.equal(outcome["weights"], outcomes[0]["weights"])
        assert outcome["steps"] == 16
        with torch.no_grad():  # every pipeline evaluates all samples
            expected = nn.functional.cross_entropy(master.model(x), y)
        assert outcome["metrics"]["val_loss"] == pytest.approx(float(expected), rel=1e-4)


def saved_in(path: Path) -> torch.Tensor:
    plain = Classifier(**MODULE)
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    return plain.weights()


def test_elastic_pipelines_resume_bit_for_bit(trained: Outcomes, folder: Path) -> None:
    """From what each pipeline had; all ranks, and a plain Trainer, find the reference's weights."""
    for epochs in (1, 2):
        for weights, _ in trained[epochs]:  # of which the first one only loads
            assert torch.equal(weights, saved_in(folder / f"epoch={epochs - 1}.ckpt"))
    for weights, metrics in [*trained["uninterrupted"], *trained[2]]:
        assert torch.equal(weights, trained[2][0][0])
        assert all(metrics[name] == trained[2][0][1][name] for name in ("loss", "val_loss"))


def test_other_numbers_of_pipelines(trained: Outcomes, folder: Path) -> None:
    """As many or fewer ranks, in one pipeline, begin from the reference: the epoch is complete, nothing is trained."""
    fewer = on_ranks(partial(fit_elastic, folder, 1, folder / "epoch=0.ckpt", 2, **ALONE, split=(2,)), 2, init=False)
    for weights, _ in [*trained["other"], *fewer]:
        assert torch.equal(weights, saved_in(folder / "epoch=0.ckpt"))
