"""Fits on real workers of Ray Train on this machine: ``python -m tests.nightly.launch.ray_fits FOLDER``.

Each worker leaves what it found in ``FOLDER/RUN-RANK.pt``, and the driver what its runs returned or raised in
``FOLDER/driver.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray
import torch
from ray import train
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor

import lightning_pipesync.ray
from tests.support.harness import raised
from tests.support.lightning_models import Classifier, make_strategy, train_loader, trainer, val_loader

#: By name of the method, settings with which its results do not depend on timing.
STRATEGIES: dict[str, dict[str, Any]] = {
    "dear": {"compression": "int8"},
    "ea_pipe": {},
    "local_sgd": {"period": 3},
    "parameter_server": {"policy": "sync"},
    "pipe_sgd": {},
    "selsync": {"delta": 0.1, "timeout_s": 15},
}
#: The method of the runs in which a worker is lost, and their number of epochs.
LOST, EPOCHS = "selsync", 3
#: By name of the run, the signal that the worker sends to itself.
FAULTS = {"restart": signal.SIGKILL, "freeze": signal.SIGSTOP}


class Fault(pl.Callback):
    """Kills or freezes the worker of rank 1 within the second epoch, once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.signal, self.pid = FAULTS[name], folder / f"{name}.pid"

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank == 1 and (trainer.current_epoch, index) == (1, 2) and not self.pid.exists():
            train.get_all_reported_checkpoints()  # waits until Ray has recorded the last one
            self.pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), self.signal)


def fit(strategy: Any, devices: int | str, folder: Path, ckpt_path: str | None = None, **kwargs: Any) -> Tensor:
    """Returns the weights after a training that draws random numbers on each rank."""
    torch.manual_seed(0)
    model = Classifier(dropout=0.3)
    run = trainer(strategy, devices, folder, **kwargs)  # type: ignore[arg-type]
    if devices == "auto":
        run = prepare_trainer(run)
    run.fit(model, train_loader(), val_loader(), ckpt_path=ckpt_path)
    return model.weights()


def ray_strategy(name: str) -> Any:
    """The strategy for Ray of a method, with its settings."""
    plain = make_strategy({"name": name})
    return getattr(lightning_pipesync.ray, f"Ray{type(plain).__name__}")(**STRATEGIES[name])


def fit_here(method: str, folder: Path, *callbacks: pl.Callback, **kwargs: Any) -> tuple[Tensor, int]:
    """Fits in this worker, with reports to Ray; returns the weights and the strategy's workers on this machine."""
    strategy, given = ray_strategy(method), {"plugins": [RayLightningEnvironment()], **kwargs}
    weights = fit(strategy, "auto", folder, callbacks=[RayTrainReportCallback(), *callbacks], **given)
    return weights, strategy.num_processes


def fit_each(folder: Path) -> None:
    found: dict[str, Any] = {name: fit_here(name, folder) for name in STRATEGIES}
    for strategy in ("dear", make_strategy({"name": "dear"})):
        fit_it = partial(fit, strategy, "auto", folder, plugins=[RayLightningEnvironment()])
        found[f"refused {type(strategy).__name__}"] = raised(fit_it)
    torch.save(found, folder / f"each-{train.get_context().get_world_rank()}.pt")


def fit_with_fault(name: str, folder: Path) -> None:
    """Fits, and resumes from the last checkpoint in the workers that are started after the fault."""
    kwargs: dict[str, Any] = {"max_epochs": EPOCHS}
    checkpoint, step = train.get_checkpoint(), None
    with nullcontext() if checkpoint is None else checkpoint.as_directory() as saved:
        if saved is not None:
            path = Path(saved) / RayTrainReportCallback.CHECKPOINT_NAME
            step = torch.load(path, weights_only=True)["global_step"]
            kwargs["ckpt_path"] = str(path)
        weights, _ = fit_here(LOST, folder, Fault(name, folder), **kwargs)
    found = {"weights": weights, "resumed_from": step}
    torch.save(found, folder / f"{name}-{train.get_context().get_world_rank()}.pt")


def run(function: Any, folder: Path, max_failures: int = 0) -> train.Result:
    return TorchTrainer(
        function,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=str(folder / "results"), failure_config=train.FailureConfig(max_failures=max_failures)
        ),
    ).fit()


def main(folder: Path) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    run(partial(fit_each, folder), folder)
    result = run(partial(fit_with_fault, "restart", folder), folder, max_failures=1)
    frozen = raised(partial(run, partial(fit_with_fault, "freeze", folder), folder))
    torch.save({"metrics": result.metrics, "path": result.checkpoint.path, "raised": frozen}, folder / "driver.pt")
    with suppress(ProcessLookupError):  # Ray may have left it
        os.kill(int((folder / "freeze.pid").read_text()), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
