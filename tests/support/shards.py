"""Replicas of several ranks: a model that FSDP2 shards, by the user or by Accelerate, and how it is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from lightning_pipesync import METHODS, PipeSyncAccelerator, PipeSyncPlugin
from lightning_pipesync.accelerate.private import use_fsdp_on_cpu
from tests.support.case_table import launch_cases
from tests.support.harness import launch

#: Calls a table of cases on new ranks: what DTensor caches refers to process groups, which end with a call.
launch_sharded = partial(launch_cases, launch=launch)

REPLICAS, SHARDS = 2, 2
RANKS = REPLICAS * SHARDS

#: By its name a method and its settings.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dear": ("dear", {"bucket_mb": 0.001}),
    "dear, forward": ("dear", {"overlap": "forward", "fusion": "none"}),
    "pipe_sgd": ("pipe_sgd", {"delay_compensation": "none"}),
    "pipe_sgd, momentum": ("pipe_sgd", {"delay_compensation": "momentum"}),
    "pipe_sgd, distance": ("pipe_sgd", {"delay_compensation": "distance", "staleness": 2}),
    "pipe_sgd, segments": ("pipe_sgd", {"delay_compensation": "none", "pipeline_level": 2}),
    "selsync": ("selsync", {"delta": 0.2, "smoothing": 0.5}),
    "selsync, forward": ("selsync", {"delta": 0.2, "smoothing": 0.5, "overlap": "forward"}),
    "local_sgd": ("local_sgd", {"period": 2}),
    "diloco": ("local_sgd", {"period": 2, "outer_optimizer": "nesterov", "lr_scale": "auto"}),
    "streaming": ("local_sgd", {"period": 3, "fragments": 3, "overlap_steps": 1, "outer_optimizer": "nesterov"}),
}


class Block(nn.Module):
    """Layers whose rows do not divide evenly among shards, or not at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, 7), nn.LayerNorm(7), nn.Linear(7, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs).tanh())
        output: Tensor = inputs + self.scale * self.last(hidden)
        return output


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), Block(5), Block(5), nn.Linear(5, 3, bias=False))


def device_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicas", "shards"))


def shard(module: nn.Module, mesh: DeviceMesh, prefetches: bool = False, **settings: Any) -> nn.Module:
    """Makes each block, and the rest, a group of FSDP2's."""
    blocks = [child for child in module.children() if isinstance(child, Block)]
    for block in blocks:
        fully_shard(block, mesh=mesh, **settings)
    found = fully_shard(module, mesh=mesh, **settings)
    if prefetches:
        found.set_modules_to_forward_prefetch(blocks)
    return found


def sharded(mesh: DeviceMesh, **settings: Any) -> nn.Module:
    return shard(model(), mesh, **settings)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 6, generator=generator) * (1 + step % 3), torch.randn(8, 3, generator=generator)


def adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-2)


def whole(module: nn.Module) -> list[Tensor]:
    """Returns all parameters; a collective call if they are sharded."""
    return [whole_of(parameter.detach()) for parameter in module.parameters()]


def whole_of(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(*both) for both in zip(found, expected, strict=True))


def attach(name: str, module: nn.Module, optimizer: Any, mesh: DeviceMesh | None = None, **others: Any) -> Any:
    """Returns a method by its name in :data:`SETTINGS`, or its own name, between the replicas of a mesh."""
    method, settings = SETTINGS.get(name, (name, {}))
    replicas = None if mesh is None else mesh["replicas"]
    return METHODS[method](module, optimizer, **{"replicas": replicas, "timeout_s": 60, **settings, **others})


def backward(module: nn.Module, step: int) -> Tensor:
    """Computes the gradients of this rank's batch of a step; returns the loss."""
    inputs, targets = batch(dist.get_rank(), step)
    loss: Tensor = (module(inputs) - targets).square().mean()
    loss.backward()
    return loss.detach()


def run(module: nn.Module, optimizer: Optimizer, sync: Any, steps: Iterable[int]) -> None:
    """Trains by a method; None: by the optimizer alone."""
    for step in steps:
        optimizer.zero_grad()
        backward(module, step)
        (sync or optimizer).step()


def end(module: nn.Module, sync: Any) -> list[Tensor]:
    """Ends a method, if there is one; returns the consolidated weights."""
    if sync is not None:
        sync.flush()
    weights = whole(module)
    if sync is not None:
        sync.detach()
    return weights


def take_steps(
    sync: Any,
    module: nn.Module,
    optimizer: Optimizer,
    steps: Iterable[list[tuple[Tensor, Tensor]]],
    max_norm: float | None = None,
    scaled: bool = False,
    overflows: bool = False,
    weight: float = 1.0,
) -> None:
    """Trains on the batches of ``steps``, whose losses count by ``weight``; if ``scaled``, one step may overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if scaled else None
    for step, batches in enumerate(steps):
        optimizer.zero_grad()
        for index, (inputs, targets) in enumerate(batches, start=1):
            if scaled and step == 3 and overflows:
                inputs = inputs * torch.inf
            with nullcontext() if index == len(batches) else sync.no_sync():
                loss = (module(inputs) - targets).square().mean() * weight
                (loss if scaler is None else scaler.scale(loss)).backward()
        sync.reduce(scaler=scaler)
        if max_norm is not None:
            sync.clip(max_norm)
        if scaler is None:
            sync.step()
        else:
            sync.step(partial(scaler.step, optimizer))
            scaler.update()


# --- Accelerate's own FSDP2 ---


class OnCpu(ParallelismConfig):
    """Accelerate's own configuration, on the CPU, where plain Accelerate does not shard."""

    plugin: Any

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        use_fsdp_on_cpu(self.plugin)
        return super().get_device_mesh(device_type)


def fsdp_plugin(**settings: Any) -> FullyShardedDataParallelPlugin:
    settings = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"], **settings}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **settings)


@contextmanager
def fresh_state() -> Iterator[None]:
    """Context manager in which Accelerate has no state of earlier cases."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def accelerator_of(name: str | None, plugin: Any = None, **settings: Any) -> Accelerator:
    """Returns an Accelerator with a method by its name in SETTINGS, or Accelerate's own on both dimensions (HSDP)."""
    sizes = {"dp_replicate_size": REPLICAS, "dp_shard_size": SHARDS}
    settings["fsdp_plugin"] = plugin or fsdp_plugin()
    if name is None:
        config = OnCpu(**sizes)
        config.plugin = settings["fsdp_plugin"]
        return Accelerator(cpu=True, parallelism_config=config, **settings)
    method, of_method = SETTINGS[name]
    pipesync = PipeSyncPlugin(method, timeout_s=60, **of_method)
    return PipeSyncAccelerator(pipesync, parallelism_config=ParallelismConfig(**sizes), **settings)
