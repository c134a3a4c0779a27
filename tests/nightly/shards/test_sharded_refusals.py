"""What replicas of several ranks refuse, on all ranks, and what they are exactly: FSDP2 on a mesh of two dimensions."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import SGD, Adadelta

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, SelSync
from tests.nightly.shards.test_sharded_replicas import (
    REPLICAS,
    SHARDS,
    adamw,
    batch,
    device_mesh,
    model,
    sharded,
    whole,
)
from tests.nightly.shards.test_sharded_tensor_parallel import parallel
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import on_ranks, raised


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


def train(make: Callable[[], nn.Module], with_fsdp: bool, policy: MixedPrecisionPolicy) -> list[Tensor]:
    """Trains with DeAR between replicas, or with FSDP2 on both dimensions of the mesh."""
    mesh, module = device_mesh(), make()
    fully_shard(module, mesh=mesh if with_fsdp else mesh["shards"], mp_policy=policy)
    optimizer = adamw(module)
    sync = None if with_fsdp else DeAR(module, optimizer, replicas=mesh["replicas"], timeout_s=60)
    for step in range(4):
        inputs, targets = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        (sync or optimizer).step()
    if sync is not None:
        sync.flush()
        sync.detach()
    return whole(module)


def lose_a_rank() -> str:
    """A rank raises, and lives on; the others wait for it, within FSDP2 or in the method."""
    mesh = device_mesh()
    module = sharded(mesh["shards"])
    sync = SelSync(module, SGD(module.parameters(), lr=0.1), timeout_s=300)
    try:
        for step in range(100):
            if step == 2 and dist.get_rank() == 1:
                raise KeyError("a bug")
            inputs, targets = batch(dist.get_rank(), step)
            (module(inputs) - targets).square().mean().backward()
            sync.step()
    except Exception as error:
        sync.detach(timeout_s=1.0)
        return type(error).__name__
    return "none"


def refuse(attach: Callable[..., Any]) -> str:
    mesh = device_mesh()
    error = raised(partial(attach, sharded(mesh["shards"]), mesh))
    return str(error)


def attach_to(method: Any, settings: dict[str, Any], module: nn.Module, mesh: Any) -> None:
    method(module, SGD(module.parameters(), lr=0.1), replicas=mesh["replicas"], timeout_s=60, **settings)


def without_replicas(module: nn.Module, mesh: Any) -> None:
    alone = fully_shard(model(), mesh=init_device_mesh("cpu", (REPLICAS * SHARDS,)))
    SelSync(alone, SGD(alone.parameters(), lr=0.1), timeout_s=60)


def with_both_dimensions(module: nn.Module, mesh: Any) -> None:
    SelSync(module, SGD(module.parameters(), lr=0.1), replicas=mesh, timeout_s=60)


def along_another_mesh(module: nn.Module, mesh: Any) -> None:
    several = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicas", "shards"))
    replicas = several["replicas" if dist.get_rank() < SHARDS else "shards"]
    SelSync(module, SGD(module.parameters(), lr=0.1), replicas=replicas, timeout_s=60)


def along_the_shards(module: nn.Module, mesh: Any) -> None:
    whole_mesh = sharded(mesh)
    SelSync(whole_mesh, SGD(whole_mesh.parameters(), lr=0.1), replicas=mesh["replicas"], timeout_s=60)


def with_other_shards(module: nn.Module, mesh: Any) -> None:
    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(int(parameter.shape == (5, 6) and dist.get_rank() >= SHARDS))

    attach_to(SelSync, {}, fully_shard(model(), mesh=mesh["shards"], shard_placement_fn=placement), mesh)


def with_an_ignored_parameter(module: nn.Module, mesh: Any) -> None:
    ignoring = model()
    attach_to(SelSync, {}, fully_shard(ignoring, mesh=mesh["shards"], ignored_params={ignoring[0].bias}), mesh)


def with_offloaded_parameters(module: nn.Module, mesh: Any) -> None:
    offload_policy = CPUOffloadPolicy(pin_memory=False)
    attach_to(SelSync, {}, fully_shard(model(), mesh=mesh["shards"], offload_policy=offload_policy), mesh)


def with_copies_that_differ(module: nn.Module, mesh: Any) -> None:
    divided = parallel(mesh["shards"])
    nn.init.constant_(divided.get_parameter("norm.weight"), 1.0 + dist.get_rank())
    attach_to(DeAR, {}, divided, mesh)


def of_one_replica() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "shards", "tensor"))


def along_one_of_two_dimensions(module: nn.Module, mesh: Any) -> None:
    mesh = of_one_replica()
    attach_to(SelSync, {}, sharded(mesh["shards"]), mesh)


def with_fsdp_on_some_layers(module: nn.Module, mesh: Any) -> None:
    mesh = of_one_replica()
    divided = parallel(mesh["tensor"])
    fully_shard(divided.get_submodule("up"), mesh=mesh["shards"])
    attach_to(SelSync, {}, divided, mesh)


def with_fsdp_after_attaching(module: nn.Module, mesh: Any) -> None:
    late = model()
    sync = SelSync(late, SGD(late.parameters(), lr=0.1), timeout_s=60)
    fully_shard(late, mesh=mesh["shards"])
    late(batch(0, 0)[0]).sum().backward()
    try:
        sync.step()
    finally:
        sync.detach()


def with_a_whole_layer(module: nn.Module, mesh: Any) -> None:
    both = nn.Sequential(module, nn.Linear(3, 3))
    SelSync(both, SGD(both.parameters(), lr=0.1), replicas=mesh["replicas"], timeout_s=60)


def with_a_whole_model(module: nn.Module, mesh: Any) -> None:
    unsharded = model()
    SelSync(unsharded, SGD(unsharded.parameters(), lr=0.1), replicas=mesh["replicas"], timeout_s=60)


def with_another_optimizer(module: nn.Module, mesh: Any) -> None:
    SelSync(module, Adadelta(module.parameters()), replicas=mesh["replicas"], timeout_s=60)


def with_other_rates(module: nn.Module, mesh: Any) -> None:
    lr = 0.1 * (1 + dist.get_rank() % SHARDS)
    SelSync(module, SGD(module.parameters(), lr=lr), replicas=mesh["replicas"], timeout_s=60)


def with_other_settings(module: nn.Module, mesh: Any) -> None:
    delta = 0.1 * (1 + dist.get_rank() % SHARDS)
    SelSync(module, SGD(module.parameters(), lr=0.1), delta=delta, replicas=mesh["replicas"], timeout_s=60)


def with_another_state(module: nn.Module, mesh: Any) -> None:
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters() if dist.get_rank() == 3 else ():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    DeAR(module, optimizer, replicas=mesh["replicas"], timeout_s=60)


#: By what each says, what is refused.
REFUSED: dict[str, Callable[..., Any]] = {
    r"is sharded \(DTensor\), and no replica of it is known: .* pass the dimension .* as replicas=": without_replicas,
    "replicas must be one dimension of a device mesh of all ranks": with_both_dimensions,
    "replicas must be one dimension of a device mesh of all ranks, .* the same on all": along_another_mesh,
    r"Parameter 0.weight is on a device mesh of the ranks \[0, 1, 2, 3\], and this rank's": along_the_shards,
    r"differ in parameter 0.weight: .*\(Shard\(dim=0\),\) at .*\(Shard\(dim=1\),\) at": with_other_shards,
    r"Parameter 0.bias is not sharded, .* pass no ignored_params": with_an_ignored_parameter,
    r"Parameter 0.weight is sharded with offload_policy=CPUOffloadPolicy\(\)": with_offloaded_parameters,
    "Parameter norm.weight differs between the ranks 0 and 1 of a replica": with_copies_that_differ,
    "Parameter 0.weight is divided among 2 ranks, as all others are, and a replica has 4": along_one_of_two_dimensions,
    "Parameter norm.weight is not sharded, and a replica has 4 ranks": with_fsdp_on_some_layers,
    r"Parameter 0.weight was sharded \(DTensor\) after SelSync was attached": with_fsdp_after_attaching,
    "Parameter 1.weight is not sharded, and a replica has 2 ranks": with_a_whole_layer,
    "Parameter 0.weight is not sharded, and a replica has 2 ranks": with_a_whole_model,
    "Adadelta is not known to be element-wise": with_another_optimizer,
    "The ranks differ in lr of group 0 of SGD: rank 0 has 0.1, rank 1 has 0.2": with_other_rates,
    "The ranks differ in delta: rank 0 has 0.1, rank 1 has 0.2": with_other_settings,
    "The ranks differ in SGD's state of 0.weight: rank 1 has none, rank 3 has digest": with_another_state,
    "update='sharded' divides what a replica .* has divided already": partial(attach_to, DeAR, {"update": "sharded"}),
    "topology='torus2d' is one of all ranks": partial(attach_to, DeAR, {"topology": "torus2d"}),
    "ranks_per_replica=4, and by the device mesh a replica has 2 ranks": partial(
        attach_to, LocalSGD, {"ranks_per_replica": 4}
    ),
    r"injection=\(0.5, 0.5\) sends rows to all ranks": partial(attach_to, SelSync, {"injection": (0.5, 0.5)}),
    "low_rank=2 factorizes whole matrices, and a replica of 2 ranks": partial(attach_to, DeAR, {"low_rank": 2}),
    "A parameter server answers each rank by itself": partial(attach_to, ParameterServer, {}),
}

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"model": model, "tied": Tied}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {says: partial(refuse, attach) for says, attach in REFUSED.items()}
    for name, make in MODELS.items():
        for precision, policy in POLICIES.items():
            for with_fsdp in (False, True):
                cases[name, precision, with_fsdp] = partial(train, make, with_fsdp, policy)
    return launch_cases(cases, REPLICAS * SHARDS)


def test_nobody_waits_for_a_lost_rank() -> None:
    assert on_ranks(lose_a_rank, REPLICAS * SHARDS) == ["RuntimeError", "KeyError", "RuntimeError", "RuntimeError"]


@pytest.mark.parametrize("says", REFUSED)
def test_refused_on_all_ranks(says: str, outcomes: Outcomes) -> None:
    for message in outcomes[says]:
        assert re.search(says, message, re.DOTALL), message


@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_dear_between_replicas_is_fsdp2_on_both_dimensions(name: str, precision: str, outcomes: Outcomes) -> None:
    """Bit for bit with two replicas, whose sums have one order."""
    for found, expected in zip(outcomes[name, precision, False], outcomes[name, precision, True], strict=True):
        assert all(map(torch.equal, found, expected))
