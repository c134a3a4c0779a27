"""Methods between replicas that FSDP2 has sharded: two replicas of two shards train what two whole replicas do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync import METHODS
from tests.support.case_table import Outcomes, launch_cases

REPLICAS, SHARDS, STEPS = 2, 2, 6

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
    """Layers whose rows do not divide evenly among shards, or not at all, one of which is used twice."""

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


def sharded(mesh: DeviceMesh, prefetches: bool = False, **settings: Any) -> nn.Module:
    """The model, of which each block and the rest are a group of FSDP2's."""
    module = model()
    blocks = [child for child in module if isinstance(child, Block)]
    for block in blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(module, mesh=mesh, **settings)
    if prefetches:
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(blocks)
    return module


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 6, generator=generator) * (1 + step % 3), torch.randn(8, 3, generator=generator)


def adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-2)


def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.1, momentum=0.9)


def whole(module: nn.Module) -> list[Tensor]:
    values = [parameter.detach() for parameter in module.parameters()]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for value in values]


def take_steps(
    sync: Any,
    module: nn.Module,
    optimizer: Optimizer,
    steps: Iterable[list[tuple[Tensor, Tensor]]],
    max_norm: float | None,
    scaled: bool,
    overflows: bool,
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


def train(
    name: str,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    max_norm: float | None = None,
    scaled: bool = False,
    passes: int = 1,
    **sharding: Any,
) -> list[Tensor]:
    """Trains two replicas, of a rank or of two; returns the weights of this rank's replica."""
    rank, per_replica = dist.get_rank(), dist.get_world_size() // REPLICAS
    mesh = device_mesh() if per_replica > 1 else None
    module = model() if mesh is None else sharded(mesh["shards"], **sharding)
    trained = optimizer(module)
    method, settings = SETTINGS[name]
    replicas = None if mesh is None else mesh["replicas"]
    sync = METHODS[method](module, trained, replicas=replicas, timeout_s=60, **settings)
    shards = range(rank * SHARDS // per_replica, (rank + 1) * SHARDS // per_replica)
    steps = [passes * [batch(shard, step) for shard in shards] for step in range(STEPS)]
    take_steps(sync, module, trained, steps, max_norm, scaled, rank == 0, per_replica / SHARDS)
    sync.flush()
    weights = whole(module)
    sync.detach()
    return weights


#: By its name what :func:`train` is called with. With a scaler, a gradient of replica 0 overflows.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in SETTINGS},
    **{f"{name}, clipped": {"name": name, "max_norm": 0.1} for name in ("dear", "pipe_sgd", "selsync", "local_sgd")},
    **{f"{name}, scaled": {"name": name, "scaled": True} for name in ("dear", "pipe_sgd", "selsync", "local_sgd")},
    **{f"{name}, two passes": {"name": name, "passes": 2} for name in ("pipe_sgd", "selsync", "local_sgd")},
    "sgd": {"name": "dear", "optimizer": sgd},
}

#: Cases that only shards have, and whose weights are those of another case.
OF_SHARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "stays whole": ("dear", {"name": "dear", "reshard_after_forward": False}),
    "prefetches": ("dear", {"name": "dear", "prefetches": True}),
    "local SGD stays whole": ("local_sgd", {"name": "local_sgd", "reshard_after_forward": False}),
}


@pytest.fixture(scope="module")
def of_whole_replicas() -> Outcomes:
    return launch_cases({name: partial(train, **case) for name, case in CASES.items()}, REPLICAS)


@pytest.fixture(scope="module")
def of_shards() -> Outcomes:
    cases = {name: partial(train, **case) for name, case in CASES.items()}
    cases |= {name: partial(train, **case) for name, (_, case) in OF_SHARDS.items()}
    return launch_cases(cases, REPLICAS * SHARDS)


@pytest.mark.parametrize("name", [*CASES, *OF_SHARDS])
def test_two_replicas_of_two_shards_train_what_two_whole_ones_do(
    name: str, of_whole_replicas: Outcomes, of_shards: Outcomes
) -> None:
    """Bit for bit, but for norms and the gradients of several passes, which are summed in another order."""
    expected = of_whole_replicas[OF_SHARDS[name][0] if name in OF_SHARDS else name]
    exact = not any(word in name for word in ("clipped", "distance", "diloco", "passes"))
    for rank, weights in enumerate(of_shards[name]):
        for found, value in zip(weights, expected[rank // SHARDS], strict=True):
            if exact:
                assert torch.equal(found, value)
            else:
                torch.testing.assert_close(found, value)
