"""What is planned for: the settings of ``pipesync plan``, the model, and how ranks hold it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync.core.dtensors import is_sharded, local_of
from lightning_pipesync.core.names import did_you_mean, did_you_mean_module
from lightning_pipesync.lab.bench.candidates import sharded
from lightning_pipesync.lab.bench.models import EMULATED, BenchModel, build_model, model_names


@dataclass(frozen=True)
class Replicas:
    """The replicas of a model; with a ``mesh`` FSDP2 shards each among the ranks of its second dimension."""

    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, ranks_per_replica: int, device: str = "cpu") -> Replicas:
        """Returns replicas of so many neighboring ranks; a collective call.

        Raises:
            ValueError: the ranks do not form two or more replicas.
        """
        return cls() if ranks_per_replica == 1 else cls(device_mesh(ranks_per_replica, device))

    @property
    def number(self) -> int:
        return dist.get_world_size() if self.mesh is None else int(self.mesh.size(0))

    @property
    def ranks_per_replica(self) -> int:
        return 1 if self.mesh is None else int(self.mesh.size(1))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard; None: all ranks."""
        return None if self.mesh is None else self.mesh.get_group(0)

    @property
    def between(self) -> DeviceMesh | None:
        """The dimension of the mesh along which methods run."""
        return None if self.mesh is None else self.mesh["replicas"]

    @property
    def within(self) -> DeviceMesh | None:
        """The dimension of the mesh along which FSDP2 shards."""
        return None if self.mesh is None else self.mesh["shards"]

    @property
    def arguments(self) -> dict[str, Any]:
        """What a method gets besides its settings."""
        return {} if self.mesh is None else {"replicas": self.between}

    def sharded(self, model: BenchModel) -> BenchModel:
        """Returns the model, sharded by its layers, if it is to be."""
        return model if self.mesh is None else sharded(model, self.mesh["shards"])

    def as_shard(self, values: Tensor) -> Tensor:
        """Returns this rank's shard ``values`` of a tensor that is divided as the model is."""
        return values if self.mesh is None else DTensor.from_local(values, self.mesh["shards"], [Shard(0)])


#: Each rank has a whole model.
EACH_RANK = Replicas()


def device_mesh(ranks_per_replica: int, device: str = "cpu") -> DeviceMesh:
    """Returns the mesh of all ranks, replicas of neighboring ones, with ``replicas`` and ``shards``; a collective call.

    Raises:
        ValueError: the ranks do not form two or more replicas.
    """
    replicas, rest = divmod(dist.get_world_size(), ranks_per_replica)
    if rest or replicas < 2:
        raise ValueError(
            f"ranks_per_replica={ranks_per_replica} does not divide {dist.get_world_size()} ranks into two or more "
            "replicas: start a rank for each device with torchrun."
        )
    return init_device_mesh(device, (replicas, ranks_per_replica), mesh_dim_names=("replicas", "shards"))


def bytes_by_group(module: nn.Module) -> list[int]:
    """Returns the bytes of this rank's shards in each group of FSDP2's; none of a module that is not sharded."""
    found, taken = [], set[int]()
    for child in reversed([child for child in module.modules() if isinstance(child, FSDPModule)]):
        shards = [local_of(p) for p in child.parameters() if id(p) not in taken]
        taken |= {id(p) for p in child.parameters()}
        found.append(sum(shard.numel() * shard.element_size() for shard in shards))
    return [num_bytes for num_bytes in found if num_bytes]


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
            hint = did_you_mean(self.model, model_names())
            raise ValueError(
                f"model={self.model!r} is neither MODULE:FUNCTION nor one of {', '.join(model_names())}.{hint}"
            )
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
        hint = did_you_mean_module(module, error)
        if isinstance(error, AttributeError) and module in sys.modules:
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
