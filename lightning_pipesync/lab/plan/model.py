"""What is planned for: the settings of ``pipesync plan``, and the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pkgutil import iter_modules, resolve_name
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.core.names import did_you_mean
from lightning_pipesync.lab.bench.candidates import sharded
from lightning_pipesync.lab.bench.models import EMULATED, BenchModel, build_model, model_names


@dataclass(frozen=True)
class PlanSettings:
    """What is planned, on each rank.

    Attributes:
        model: Yours, as MODULE:FUNCTION, which returns (module, batch, loss), where loss(module, batch) is a scalar; or
            transformer, cnn, resnet50 or bert-base; or emulated-alexnet, emulated-resnet50, emulated-bert-base or
            emulated-bert-large, whose layers sleep.
        scale: Number of values in each tensor of an emulated model over the true number.
        compute_ms: Forward and backward pass of an emulated model, in milliseconds.
        steps: Least number of steps of one measurement of a method.
        rounds: Number of measurements of each method that is run, in turns; 0: only predict.
        ranks_per_replica: Neighboring ranks among which FSDP2 shards a replica, those of a host; then methods between
            hosts are planned, beside HSDP. Your function gets the mesh, along which it has to shard the module.
        device: cpu; or cuda, a GPU for each rank, over NCCL, with a model of yours.

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    model: str = "emulated-resnet50"
    scale: float = 0.1
    compute_ms: float = 200.0
    steps: int = 5
    rounds: int = 3
    ranks_per_replica: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.model not in model_names() and ":" not in self.model:
            raise ValueError(f"model={self.model!r} is neither MODULE:FUNCTION nor one of {', '.join(model_names())}.")
        for name in ("scale", "compute_ms", "steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}.")
        if self.ranks_per_replica < 1:
            raise ValueError(f"ranks_per_replica must be at least 1, got {self.ranks_per_replica!r}.")
        if self.rounds < 0:
            raise ValueError(f"rounds must not be negative, got {self.rounds!r}.")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', got {self.device!r}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda', and torch finds no GPU here: leave it at 'cpu', or install a CUDA build.")
        if self.device == "cuda" and self.model.startswith(EMULATED):
            raise ValueError(f"The layers of {self.model} sleep, and use no GPU: set device='cpu'.")

    def check_model(self) -> None:
        """Raises ValueError, with a name that is meant, if the module or the function cannot be imported."""
        if self.model not in model_names():
            _function_of(self.model)

    def build(self, mesh: DeviceMesh | None = None) -> BenchModel:
        """Returns the model, which FSDP2 has sharded along ``mesh`` if that is given.

        ValueError if there is no such function, or it returns something else.
        """
        if self.model in model_names():
            seconds = self.compute_ms / 3000
            of_emulated: dict[str, Any] = {
                "scale": self.scale,
                "forward_seconds": seconds,
                "backward_seconds": 2 * seconds,
            }
            model = build_model(self.model, **(of_emulated if self.model.startswith(EMULATED) else {})).to(self.device)
            return model if mesh is None else sharded(model, mesh)
        if mesh is None:
            return _users_own(self.model).to(self.device)
        model = _users_own(self.model, mesh)
        if not is_sharded(model.module):
            raise ValueError(
                f"model={self.model!r} returned a module that is not sharded: with ranks_per_replica="
                f"{self.ranks_per_replica} it gets a mesh, for fully_shard(layer, mesh=mesh) of each layer and of the "
                "module."
            )
        return model


def _function_of(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            hint = did_you_mean(module, (one.name for one in iter_modules([os.getcwd()])))
        elif isinstance(error, AttributeError) and module in sys.modules:
            hint = did_you_mean(function, vars(sys.modules[module]))
        raise ValueError(f"model={name!r}: {type(error).__name__}: {error}.{hint} Give MODULE:FUNCTION.") from error
    return found


def _users_own(name: str, *arguments: Any) -> BenchModel:
    """Returns what the user's function makes, of a module in the present folder or of an installed one."""
    function = _function_of(name)
    if arguments and not signature(function).parameters:
        raise ValueError(f"model={name!r}: it takes no mesh, along which to shard the module.")
    made = function(*arguments)
    match made:
        case (nn.Module() as module, batch, loss) if callable(loss):
            return BenchModel(name, module, [], lambda rank: batch, loss)
        case (nn.Module(training_step=_) as module, loader):
            if not getattr(module, "automatic_optimization", True):
                raise ValueError(
                    f"model={name!r}: {type(module).__name__} has automatic_optimization=False, so that its training "
                    "step has no loss: return (module, batch, loss) instead."
                )
            batch = next(iter(loader))
            return BenchModel(name, module, [], lambda rank: batch, _loss_of_training_step)
    raise ValueError(
        f"model={name!r} returned {type(made).__name__}: return (module, batch, loss), of which loss(module, batch) is "
        "a scalar tensor; or (LightningModule, loader)."
    )


def _loss_of_training_step(module: Any, batch: Any) -> Any:
    """Returns the loss of a LightningModule, which is in no Trainer, or of one in DDP.

    DDP prepares its reductions in its forward pass, so that the training step has to run within that.
    """
    lightning_module: Any = module.module if isinstance(module, DistributedDataParallel) else module
    arguments = (batch, 0) if len(signature(lightning_module.training_step).parameters) > 1 else (batch,)
    if lightning_module is module:
        result = lightning_module.training_step(*arguments)
    else:

        def training_step(*arguments: Any) -> Any:
            del lightning_module.forward  # the training step may call the module
            return lightning_module.training_step(*arguments)

        lightning_module.forward = training_step
        result = module(*arguments)
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"{type(lightning_module).__name__}.training_step returned {type(loss).__name__} as its loss.")
    return loss
