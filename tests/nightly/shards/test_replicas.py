"""Two replicas of two ranks, by FSDP2 or by tensor parallelism, train what two whole ones do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from lightning_pipesync import METHODS
from tests.support.case_table import Outcomes
from tests.support.shards import (
    RANKS,
    REPLICAS,
    SETTINGS,
    SHARDS,
    adamw,
    attach,
    batch,
    device_mesh,
    end,
    equal,
    launch_sharded,
    model,
    run,
    shard,
    sharded,
    take_steps,
    whole,
)

STEPS = 6
Case = dict[str, Any]

#: Codecs, with which the copies of what tensor parallelism leaves whole must not drift apart.
LOSSY: dict[str, tuple[str, dict[str, Any]]] = {
    "dear, int8": ("dear", {"compression": "int8", "bucket_mb": 0.0005}),
    "pipe_sgd, int8": ("pipe_sgd", {"compression": "int8", "delay_compensation": "none", "pipeline_level": 2}),
    "selsync, int8": ("selsync", {"compression": "int8", "delta": 0.2, "smoothing": 0.5}),
    "local_sgd, topk": ("local_sgd", {"compression": "topk", "period": 2, "fragments": 2}),
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


def texts(reader: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(reader, step)
    return inputs.view(2, 4, 6), targets.view(2, 4, 3)


def copies_in(module: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's values of what tensor parallelism has left whole."""
    found = {}
    for name, parameter in module.named_parameters():
        if getattr(parameter, "placements", (Replicate(),))[-1] == Replicate():
            found[name] = getattr(parameter, "_local_tensor", parameter).detach().clone()
    return found


def train(
    by: str, name: str, max_norm: float | None = None, scaled: bool = False, passes: int = 1, **sharding: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Trains two replicas, of a rank or of two; returns the weights of this rank's replica, and copies.

    With a scaler a gradient of replica 0 overflows: on one of its ranks.
    """
    rank, per_replica = dist.get_rank(), dist.get_world_size() // REPLICAS
    mesh, replica = (device_mesh() if per_replica > 1 else None), rank // per_replica
    if by == "tensor parallelism":
        module = Net() if mesh is None else parallel(mesh["shards"])
        readers = [[replica + REPLICAS * index] for index in range(passes)]
    else:
        module = model() if mesh is None else sharded(mesh["shards"], **sharding)
        readers = passes * [range(rank * SHARDS // per_replica, (rank + 1) * SHARDS // per_replica)]
    optimizer = adamw(module)
    method, settings = (SETTINGS | LOSSY)[name]
    replicas = None if mesh is None else mesh["replicas"]
    sync: Any = METHODS[method](module, optimizer, replicas=replicas, timeout_s=60, **settings)
    if by == "tensor parallelism":
        assert sync.transport.place_of_data == (replica, REPLICAS)
        data, weight, overflows = texts, 1.0, replica == 0
    else:
        data, weight, overflows = batch, per_replica / SHARDS, rank == 0
    steps = [[data(one, step) for some in readers for one in some] for step in range(STEPS)]
    take_steps(sync, module, optimizer, steps, max_norm, scaled, overflows, weight)
    return end(module, sync), copies_in(module)


FSDP, TENSOR = "FSDP2", "tensor parallelism"
#: What :func:`train` is called with.
CASES: list[Case] = [
    *({"by": by, "name": name} for by in (FSDP, TENSOR) for name in SETTINGS),
    *({"by": FSDP, "name": name, "max_norm": 0.1} for name in ("dear", "selsync")),
    *({"by": TENSOR, "name": name, "max_norm": 0.1} for name in ("pipe_sgd", "local_sgd")),
    *({"by": FSDP, "name": name, "scaled": True} for name in ("pipe_sgd", "local_sgd")),
    *({"by": TENSOR, "name": name, "scaled": True} for name in ("dear", "selsync")),
    *({"by": FSDP, "name": name, "passes": 2} for name in ("pipe_sgd", "selsync")),
    *({"by": TENSOR, "name": name, "passes": 2} for name in ("dear", "local_sgd")),
    {"by": FSDP, "name": "dear", "reshard_after_forward": False},
    {"by": FSDP, "name": "local_sgd", "reshard_after_forward": False},
    {"by": FSDP, "name": "dear", "prefetches": True},
]


def key_of(case: Case) -> str:
    return ", ".join(map(str, case.values()))


def train_by_hand() -> list[Tensor]:
    """Trains with plain torch: tensor parallelism in each replica, and averages of gradients between them."""
    mesh = device_mesh()
    module = parallel(mesh["shards"])
    optimizer = adamw(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = texts(dist.get_rank() // SHARDS, step)
        (module(inputs) - targets).square().mean().backward()
        for parameter in module.parameters():
            if hasattr(parameter, "placements"):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            dist.all_reduce(gradient, group=mesh["replicas"].get_group())
            gradient.div_(REPLICAS)
        optimizer.step()
    return whole(module)


class Tied(nn.Module):
    """Two layers with one weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
        self.layers[1].weight = self.layers[0].weight
        self.layers[2].bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def train_tied(with_fsdp: bool) -> list[Tensor]:
    """Trains with DeAR between replicas, or with FSDP2 on both dimensions of the mesh, in bf16."""
    mesh, policy = device_mesh(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = shard(Tied(), mesh if with_fsdp else mesh["shards"], mp_policy=policy)
    optimizer = adamw(module)
    sync = None if with_fsdp else attach("dear", module, optimizer, mesh)
    run(module, optimizer, sync, range(STEPS))
    return end(module, sync)


def train_in_three_dimensions(with_fsdp: bool) -> tuple[list[Tensor], dict[str, Tensor], list[float]]:
    """Trains with DeAR between replicas, or with FSDP2; within them with FSDP2 over tensor parallelism."""
    mesh = init_device_mesh("cpu", (REPLICAS, 2, 2), mesh_dim_names=("replicas", "shards", "tensor"))
    module = parallel(mesh["tensor"])
    fully_shard(module, mesh=mesh["replicas", "shards"] if with_fsdp else mesh["shards"])
    optimizer = adamw(module)
    sync: Any = None if with_fsdp else METHODS["dear"](module, optimizer, bucket_mb=0.0005, timeout_s=60)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = texts(dist.get_rank() // 2, step)
        (module(inputs) - targets).square().mean().backward()
        if sync is None:
            norms.append(nn.utils.get_total_norm([p.grad.full_tensor() for p in module.parameters()]).item())
            optimizer.step()
        else:
            assert sync.transport.place_of_data == (dist.get_rank() // 2, 2 * REPLICAS)
            norms.append(sync.clip(1e9).item())
            sync.step()
    return end(module, sync), copies_in(module), norms


@pytest.fixture(scope="module")
def of_whole_replicas() -> Outcomes:
    cases = {(case["by"], case["name"], *options_of(case)): case for case in CASES}
    return launch_sharded({key: partial(train, **case) for key, case in cases.items()}, REPLICAS)


def options_of(case: Case) -> tuple[str, ...]:
    """Returns the options that whole replicas have, too."""
    return tuple(option for option in ("max_norm", "scaled", "passes") if option in case)


@pytest.fixture(scope="module")
def divided() -> Outcomes:
    cases: dict[Any, Any] = {key_of(case): partial(train, **case) for case in CASES}
    cases |= {name: partial(train, TENSOR, name) for name in LOSSY}
    cases |= {("tied", with_fsdp): partial(train_tied, with_fsdp) for with_fsdp in (False, True)}
    return launch_sharded({**cases, "by hand": train_by_hand}, RANKS)


@pytest.mark.parametrize("case", CASES, ids=key_of)
def test_two_replicas_of_two_ranks_train_what_two_whole_ones_do(
    case: Case, of_whole_replicas: Outcomes, divided: Outcomes
) -> None:
    """With FSDP2 bit for bit, but for norms and the gradients of several passes, which are summed in another order."""
    expected = of_whole_replicas[(case["by"], case["name"], *options_of(case))]
    exact = case["by"] == FSDP and not any(word in key_of(case) for word in ("distance", "diloco"))
    exact &= not {"max_norm", "passes"} & {*case}
    for rank, (weights, _) in enumerate(divided[key_of(case)]):
        for found, value in zip(weights, expected[rank // SHARDS][0], strict=True):
            torch.testing.assert_close(found, value, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("key", [*(key_of(case) for case in CASES if case["by"] == TENSOR), *LOSSY])
def test_ranks_of_a_replica_keep_the_same_copies(key: str, divided: Outcomes) -> None:
    of_ranks = [copies for _, copies in divided[key]]
    for first, second in (of_ranks[:2], of_ranks[2:]):
        assert set(first) == {"norm.weight", "norm.bias", "down.bias", "of_sequence.weight", "of_sequence.bias"}
        assert equal(first.values(), second.values())


def test_dear_is_plain_torch_bit_for_bit(divided: Outcomes) -> None:
    """With two replicas, whose sums have one order: also with shared and frozen weights in mixed precision."""
    for (found, _), expected in zip(divided[f"{TENSOR}, dear"], divided["by hand"], strict=True):
        assert equal(found, expected)
    for found, expected in zip(divided["tied", False], divided["tied", True], strict=True):
        assert equal(found, expected)


def test_dear_is_fsdp2_over_tensor_parallelism_bit_for_bit() -> None:
    cases = {with_fsdp: partial(train_in_three_dimensions, with_fsdp) for with_fsdp in (False, True)}
    outcomes = launch_sharded(cases, 2 * RANKS)
    of_ranks = outcomes[False]
    for (found, _, norms), (expected, _, norms_of_fsdp) in zip(of_ranks, outcomes[True], strict=True):
        assert equal(found, expected)
        assert norms == pytest.approx(norms_of_fsdp, rel=1e-5)
    for (_, first, _), (_, second, _) in zip(of_ranks[::2], of_ranks[1::2], strict=True):
        assert first
        assert equal(first.values(), second.values())
