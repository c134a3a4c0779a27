"""Methods between replicas that tensor parallelism divides, and leaves whole in part, with FSDP2 over it or without."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.optim import AdamW

from lightning_pipesync import METHODS, DeAR
from tests.nightly.shards.test_sharded_replicas import SETTINGS, take_steps, whole
from tests.support.case_table import Outcomes, launch_cases

REPLICAS, RANKS, STEPS = 2, 2, 5

#: Settings that only tests of copies have.
LOSSY: dict[str, tuple[str, dict[str, Any]]] = {
    "dear, int8": ("dear", {"compression": "int8", "bucket_mb": 0.0005}),
    "pipe_sgd, int8": ("pipe_sgd", {"compression": "int8", "delay_compensation": "none", "pipeline_level": 2}),
    "selsync, int8": ("selsync", {"compression": "int8", "delta": 0.2, "smoothing": 0.5}),
    "local_sgd, int4": ("local_sgd", {"compression": "int4", "period": 2, "fragments": 2, "bucket_mb": 0.0005}),
    "local_sgd, topk": ("local_sgd", {"compression": "topk", "period": 2}),
}


class Net(nn.Module):
    """A norm that no rank divides, one whose inputs are divided, and a head whose rows do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.of_sequence, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.down(self.up(self.norm(inputs)).tanh())
        output: Tensor = self.head(self.of_sequence(hidden))
        return output


def parallel(mesh: DeviceMesh) -> nn.Module:
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "of_sequence": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(Net(), mesh, plan)


def batch(reader: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * reader + step)
    return torch.randn(4, 4, 6, generator=generator) * (1 + step % 3), torch.randn(4, 4, 3, generator=generator)


def copies_in(module: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's values of what tensor parallelism has left whole."""
    found = {}
    for name, parameter in module.named_parameters():
        placements = getattr(parameter, "placements", (Replicate(),))
        if placements[-1] == Replicate():
            found[name] = getattr(parameter, "_local_tensor", parameter).detach().clone()
    return found


def train(
    name: str, max_norm: float | None = None, scaled: bool = False, passes: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Trains replicas of a rank, or of ranks that divide the layers; returns whole weights and copies."""
    per_replica = dist.get_world_size() // REPLICAS
    mesh = init_device_mesh("cpu", (REPLICAS, per_replica), mesh_dim_names=("replicas", "tensor"))
    module = parallel(mesh["tensor"]) if per_replica > 1 else Net()
    trained = AdamW(module.parameters(), lr=1e-2)
    method, settings = (SETTINGS | LOSSY)[name]
    replicas = mesh["replicas"] if per_replica > 1 else None
    sync = METHODS[method](module, trained, replicas=replicas, timeout_s=60, **settings)
    place, number = sync.transport.place_of_data
    assert (place, number) == (dist.get_rank() // per_replica, REPLICAS)
    steps = [[batch(place + number * index, step) for index in range(passes)] for step in range(STEPS)]
    take_steps(sync, module, trained, steps, max_norm, scaled, place == 0)
    sync.flush()
    sync.detach()
    return whole(module), copies_in(module)


def train_by_hand(max_norm: float | None = None) -> list[Tensor]:
    """Trains with plain torch: tensor parallelism in each replica, and averages of gradients between them."""
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("replicas", "tensor"))
    module = parallel(mesh["tensor"])
    optimizer = AdamW(module.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(dist.get_rank() // RANKS, step)
        (module(inputs) - targets).square().mean().backward()
        for parameter in module.parameters():
            if hasattr(parameter, "placements"):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            dist.all_reduce(gradient, group=mesh["replicas"].get_group())
            gradient.div_(REPLICAS)
        optimizer.step()
    return whole(module)


def train_in_three_dimensions(with_fsdp: bool) -> tuple[list[Tensor], dict[str, Tensor], list[float]]:
    """Trains with DeAR between replicas, or with FSDP2; within them with FSDP2 over tensor parallelism."""
    names = ("replicas", "shards", "tensor")
    mesh = init_device_mesh("cpu", (REPLICAS, 2, RANKS), mesh_dim_names=names)
    module = parallel(mesh["tensor"])
    fully_shard(module, mesh=mesh["replicas", "shards"] if with_fsdp else mesh["shards"])
    optimizer = AdamW(module.parameters(), lr=1e-2)
    sync = None if with_fsdp else DeAR(module, optimizer, bucket_mb=0.0005, timeout_s=60)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(dist.get_rank() // RANKS, step)
        (module(inputs) - targets).square().mean().backward()
        if sync is None:
            gradients = [parameter.grad.full_tensor() for parameter in module.parameters()]  # type: ignore[union-attr]
            norms.append(nn.utils.get_total_norm(gradients).item())
            optimizer.step()
        else:
            assert sync.transport.place_of_data == (dist.get_rank() // RANKS, 2 * REPLICAS)
            norms.append(sync.clip(1e9).item())
            sync.step()
    if sync is not None:
        sync.flush()
        sync.detach()
    return whole(module), copies_in(module), norms


#: By its name what :func:`train` is called with. With a scaler, a gradient of replica 0 overflows.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in SETTINGS},
    **{f"{name}, clipped": {"name": name, "max_norm": 0.1} for name in ("dear", "pipe_sgd", "selsync", "local_sgd")},
    **{f"{name}, scaled": {"name": name, "scaled": True} for name in ("dear", "selsync")},
    **{f"{name}, two passes": {"name": name, "passes": 2} for name in ("dear", "local_sgd")},
}


@pytest.fixture(scope="module")
def of_whole_replicas() -> Outcomes:
    return launch_cases({name: partial(train, **case) for name, case in CASES.items()}, REPLICAS)


@pytest.fixture(scope="module")
def divided() -> Outcomes:
    cases: dict[str, Any] = {name: partial(train, **case) for name, case in CASES.items()}
    cases |= {name: partial(train, name) for name in LOSSY}
    return launch_cases({**cases, "by hand": train_by_hand}, REPLICAS * RANKS)


@pytest.fixture(scope="module")
def in_three_dimensions() -> Outcomes:
    cases = {with_fsdp: partial(train_in_three_dimensions, with_fsdp) for with_fsdp in (False, True)}
    return launch_cases(cases, REPLICAS * 2 * RANKS)


@pytest.mark.parametrize("name", CASES)
def test_two_divided_replicas_train_what_two_whole_ones_do(
    name: str, of_whole_replicas: Outcomes, divided: Outcomes
) -> None:
    for rank, (weights, _) in enumerate(divided[name]):
        expected, _ = of_whole_replicas[name][rank // RANKS]
        for found, value in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, value)


def test_dear_is_plain_torch_bit_for_bit(divided: Outcomes) -> None:
    for (found, _), expected in zip(divided["dear"], divided["by hand"], strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", [*CASES, *LOSSY])
def test_ranks_of_a_replica_keep_the_same_copies(name: str, divided: Outcomes) -> None:
    of_ranks = [copies for _, copies in divided[name]]
    for first, second in (of_ranks[:2], of_ranks[2:]):
        assert set(first) == {"norm.weight", "norm.bias", "down.bias", "of_sequence.weight", "of_sequence.bias"}
        for key, values in first.items():
            assert torch.equal(values, second[key]), key


def test_dear_is_fsdp2_over_tensor_parallelism_bit_for_bit(in_three_dimensions: Outcomes) -> None:
    of_ranks = in_three_dimensions[False]
    for (found, _, norms), (expected, _, norms_of_fsdp) in zip(of_ranks, in_three_dimensions[True], strict=True):
        assert all(map(torch.equal, found, expected))
        assert norms == pytest.approx(norms_of_fsdp, rel=1e-5)
    for rank in range(0, len(of_ranks), RANKS):
        first, second = of_ranks[rank][1], of_ranks[rank + 1][1]
        assert first
        assert all(torch.equal(values, second[key]) for key, values in first.items())
