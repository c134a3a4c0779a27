"""What replicas of several ranks refuse, on all ranks: in plain loops, Fabric, a Trainer and Accelerate."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import SGD, Adadelta, Adafactor, Muon
from torch.utils.data import DataLoader

from lightning_pipesync import DeARStrategy, LocalSGDStrategy, PipeSyncAccelerator, PipeSyncPlugin, SelSyncStrategy
from lightning_pipesync.fabric import DeARFabricStrategy, LocalSGDFabricStrategy, SelSyncFabricStrategy
from tests.nightly.shards.test_replicas import parallel
from tests.nightly.shards.test_trainers import Module, OnItsOwnMesh, Whole, data, run_of
from tests.support.case_table import Outcomes
from tests.support.harness import assert_refused, raised
from tests.support.shards import (
    RANKS,
    REPLICAS,
    SHARDS,
    accelerator_of,
    adamw,
    attach,
    backward,
    batch,
    device_mesh,
    fresh_state,
    fsdp_plugin,
    launch_sharded,
    model,
    sharded,
)

SHORT = {"timeout_s": 20}
Refuse = Callable[[], Any]


# --- plain loops ---


def sgd(module: nn.Module, lr: float = 0.1) -> SGD:
    return SGD(module.parameters(), lr=lr)


def attached(method: str = "selsync", module: nn.Module | None = None, optimizer: Any = None, **settings: Any) -> None:
    """Attaches a method between the replicas of the mesh to a module, by default one that is sharded within them."""
    mesh = device_mesh()
    module = sharded(mesh["shards"]) if module is None else module
    attach(method, module, (optimizer or sgd)(module), mesh, **settings)


def shards_of(dimensions: Any = "shards", **settings: Any) -> nn.Module:
    mesh = device_mesh()
    return fully_shard(model(), mesh=mesh if dimensions is None else mesh[dimensions], **settings)


def without_replicas() -> None:
    module = fully_shard(model(), mesh=init_device_mesh("cpu", (RANKS,)))
    attach("selsync", module, sgd(module))


def along(mesh_of: Callable[[Any], Any]) -> None:
    mesh = device_mesh()
    module = sharded(mesh["shards"])
    attach("selsync", module, sgd(module), None, replicas=mesh_of(mesh))


def with_other_shards() -> None:
    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(int(parameter.shape == (5, 6) and dist.get_rank() >= SHARDS))

    attached(module=shards_of(shard_placement_fn=placement))


def with_an_ignored_parameter() -> None:
    module = model()
    attached(module=fully_shard(module, mesh=device_mesh()["shards"], ignored_params={module[0].bias}))


def with_copies_that_differ() -> None:
    divided = parallel(device_mesh()["shards"])
    nn.init.constant_(divided.get_parameter("norm.weight"), 1.0 + dist.get_rank())
    attached("dear", divided)


def with_fsdp_on_one_of_two_dimensions(divides: bool) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "shards", "tensor"))
    module = parallel(mesh["tensor"]) if divides else sharded(mesh["shards"])
    if divides:
        fully_shard(module.get_submodule("up"), mesh=mesh["shards"])
    attach("selsync", module, sgd(module), mesh)


def with_fsdp_after_attaching() -> None:
    module = model()
    sync = attach("selsync", module, sgd(module))
    fully_shard(module, mesh=device_mesh()["shards"])
    backward(module, 0)
    try:
        sync.step()
    finally:
        sync.detach()


def with_another_state() -> None:
    def with_momentum(module: nn.Module) -> SGD:
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        for parameter in module.parameters() if dist.get_rank() == 3 else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        return optimizer

    attached("dear", optimizer=with_momentum)


def of_matrices(kind: Any) -> Callable[[nn.Module], Any]:
    return lambda module: kind([parameter for parameter in module.parameters() if parameter.dim() == 2])


NO_DIMENSION = "replicas must be one dimension of a device mesh of all ranks"
#: By what each says, what is refused.
IN_LOOPS: dict[str, Refuse] = {
    r"is sharded \(DTensor\), and no replica of it is known: .* pass the dimension .* as replicas=": without_replicas,
    NO_DIMENSION: lambda: along(lambda mesh: mesh),
    f"{NO_DIMENSION}, .* the same on all": lambda: along(
        lambda mesh: mesh["replicas" if dist.get_rank() < SHARDS else "shards"]
    ),
    r"Parameter 0.weight is on a device mesh of the ranks \[0, 1, 2, 3\], and this rank's": lambda: attached(
        module=shards_of(None)
    ),
    r"differ in parameter 0.weight: .*\(Shard\(dim=0\),\) at .*\(Shard\(dim=1\),\) at": with_other_shards,
    r"Parameter 0.bias is not sharded, .* pass no ignored_params": with_an_ignored_parameter,
    r"Parameter 0.weight is sharded with offload_policy=CPUOffloadPolicy\(\)": lambda: attached(
        module=shards_of(offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    "Parameter norm.weight differs between the ranks 0 and 1 of a replica": with_copies_that_differ,
    "Parameter 0.weight is divided among 2 ranks, as all others are, and a replica has 4": partial(
        with_fsdp_on_one_of_two_dimensions, False
    ),
    "Parameter norm.weight is not sharded, and a replica has 4 ranks": partial(
        with_fsdp_on_one_of_two_dimensions, True
    ),
    r"Parameter 0.weight was sharded \(DTensor\) after SelSync was attached": with_fsdp_after_attaching,
    "Parameter 1.weight is not sharded, and a replica has 2 ranks": lambda: attached(
        module=nn.Sequential(sharded(device_mesh()["shards"]), nn.Linear(3, 3))
    ),
    "Parameter 0.weight is not sharded, and a replica has 2 ranks": lambda: attached(module=model()),
    "Adadelta is not known to be element-wise": lambda: attached(optimizer=lambda m: Adadelta(m.parameters())),
    "Adafactor is not known to be element-wise": lambda: attached(optimizer=of_matrices(Adafactor)),
    "Muon steps on whole matrices, and this method updates shards of them": lambda: attached(
        "dear", optimizer=of_matrices(Muon)
    ),
    "Muon steps on whole matrices, and this method updates": lambda: attached("pipe_sgd", optimizer=of_matrices(Muon)),
    "The ranks differ in lr of group 0 of SGD: rank 0 has 0.1, rank 1 has 0.2": lambda: attached(
        optimizer=lambda module: sgd(module, 0.1 * (1 + dist.get_rank() % SHARDS))
    ),
    "The ranks differ in delta: rank 0 has 0.1, rank 1 has 0.2": lambda: attached(
        delta=0.1 * (1 + dist.get_rank() % SHARDS)
    ),
    "The ranks differ in SGD's state of 0.weight: rank 1 has none, rank 3 has digest": with_another_state,
    "update='sharded' divides what a replica .* has divided already": partial(attached, "dear", update="sharded"),
    "topology='torus2d' is one of all ranks": partial(attached, "dear", topology="torus2d"),
    "ranks_per_replica=4, and by the device mesh a replica has 2": partial(attached, "local_sgd", ranks_per_replica=4),
    r"injection=\(0.5, 0.5\) sends rows to all ranks": partial(attached, injection=(0.5, 0.5)),
    "low_rank=2 factorizes whole matrices, and a replica of 2 ranks": partial(attached, "dear", low_rank=2),
    "A parameter server answers each rank by itself": partial(attached, "parameter_server"),
}


# --- Fabric ---


def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(module, mesh=mesh["data_parallel"])


def set_up(strategy: Callable[..., Any], has_state: bool = False, **settings: Any) -> None:
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy(**SHORT, **settings))
    fabric.launch()
    module = model()
    optimizer = adamw(module)
    if has_state:
        module(batch(0, 0)[0]).square().mean().backward()
        optimizer.step()
    fabric.setup(module, optimizer)


IN_FABRIC: dict[str, Refuse] = {
    "ranks_per_replica=2 is for a model that is sharded, and this Sequential is not: pass parallelize_fn": partial(
        set_up, SelSyncFabricStrategy, ranks_per_replica=2
    ),
    "parallelize_fn must return the model, got None": partial(
        set_up, DeARFabricStrategy, ranks_per_replica=2, parallelize_fn=lambda module, mesh: None
    ),
    "ranks_per_replica=3 does not divide the number of ranks, 4": partial(
        set_up, DeARFabricStrategy, ranks_per_replica=3
    ),
    "AdamW has a state of whole parameters": partial(
        set_up, DeARFabricStrategy, has_state=True, ranks_per_replica=2, parallelize_fn=parallelize
    ),
}


# --- a Trainer ---


def fit(make: Callable[[], Any], strategy: Callable[..., Any], layout: dict[str, int], **settings: Any) -> None:
    run_of(strategy(**SHORT, **layout), **settings).fit(make(), DataLoader(data(), batch_size=3, shuffle=True))


def averaged(callback: Callable[[], Any], **layout: int) -> None:
    fit(Module, DeARStrategy, layout, callbacks=[callback()])


def with_other_numbers_of_batches() -> None:
    """The ranks that hold the same shard have as many, and those of a replica have not."""
    number = 3 + int(os.environ["RANK"]) % SHARDS
    fit(Module, DeARStrategy, {"ranks_per_replica": 2}, use_distributed_sampler=False, limit_train_batches=number)


IN_A_TRAINER: dict[str, Refuse] = {
    "ranks_per_replica=2 is for a model that is sharded, and this Whole is not: shard it in configure_model": partial(
        fit, Whole, SelSyncStrategy, {"ranks_per_replica": 2}
    ),
    "ranks_per_replica=3 does not divide the number of ranks, 4: set one of 1, 2, 4": partial(
        fit, Module, DeARStrategy, {"ranks_per_replica": 3}
    ),
    "Parameter layers.0.weight is divided among 2 ranks": partial(
        fit, Module, DeARStrategy, {"ranks_per_replica": 4, "tensor_parallel_size": 2}
    ),
    "there are 2 different batches at a time, and tensor_parallel_size of strategy='dear' says": partial(
        fit, OnItsOwnMesh, DeARStrategy, {}
    ),
    "EMAWeightAveraging copies the module": partial(averaged, EMAWeightAveraging, ranks_per_replica=2),
    " copies the module, and FSDP2 does not allow that": partial(averaged, WeightAveraging),
    "StochasticWeightAveraging copies the module": partial(
        averaged, partial(StochasticWeightAveraging, swa_lrs=0.1), ranks_per_replica=2
    ),
    "The ranks differ in the number of training batches in an epoch: rank 0 has 3": with_other_numbers_of_batches,
}


# --- Accelerate ---


def prepare(method: str = "dear", plugin: Any = None, **settings: Any) -> None:
    sizes = {"dp_replicate_size": REPLICAS, "dp_shard_size": SHARDS}
    settings = {"parallelism_config": ParallelismConfig(**sizes), **settings}
    shards = fsdp_plugin() if plugin is None else FullyShardedDataParallelPlugin(**plugin)
    with fresh_state():
        accelerator = PipeSyncAccelerator(PipeSyncPlugin(method, timeout_s=60), fsdp_plugin=shards, **settings)
        module = model()
        accelerator.prepare(module, adamw(module))


def prepare_for(**sizes: int) -> None:
    prepare(parallelism_config=ParallelismConfig(dp_shard_size=2, **sizes))


def with_a_second_accelerator() -> None:
    """Accelerate's own was there first, and shards on both dimensions."""
    with fresh_state():
        accelerator_of(None)
        PipeSyncAccelerator(PipeSyncPlugin("dear"))


IN_ACCELERATE: dict[str, Refuse] = {
    "fsdp_version=1 is not supported with method='dear'": partial(prepare, plugin={"fsdp_version": 1}),
    "fsdp_plugin without parallelism_config shards the model over all": partial(prepare, parallelism_config=None),
    "cpu_offload=True is not supported": partial(prepare, plugin={"fsdp_version": 2, "cpu_offload": True}),
    "tp_size=2 in parallelism_config is not supported": partial(prepare_for, tp_size=2),
    "cp_size=2 in parallelism_config is not supported": partial(prepare_for, cp_size=2),
    "method='ea_pipe' divides the model among the ranks itself": partial(prepare, "ea_pipe"),
    "A parameter server answers each rank by itself": partial(prepare, "parameter_server"),
    "use MULTI_GPU, FSDP with fsdp_version=2 and a parallelism_config": with_a_second_accelerator,
}

WITHIN = {"a loop": IN_LOOPS, "Fabric": IN_FABRIC, "a Trainer": IN_A_TRAINER, "Accelerate": IN_ACCELERATE}


def refused(within: str, says: str) -> str:
    return str(raised(WITHIN[within][says]))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcomes]:
    found = {}
    for init in (True, False):
        cases = {(w, says): partial(refused, w, says) for w in WITHIN if (w == "a loop") == init for says in WITHIN[w]}
        found |= dict.fromkeys({w for w, _ in cases}, launch_sharded(cases, RANKS, init=init))
    return found


@pytest.mark.parametrize(("within", "says"), [(within, says) for within in WITHIN for says in WITHIN[within]])
def test_refused_on_all_ranks(within: str, says: str, outcomes: dict[str, Outcomes]) -> None:
    for message in outcomes[within][within, says]:
        assert re.search(says, message, re.DOTALL), message


def test_sizes_that_do_not_fit() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "ranks_per_replica must be an integer of at least 1, got 0": {"ranks_per_replica": 0},
        "ranks_per_replica must be an integer, got 'two'": {"ranks_per_replica": "two"},
        "tensor_parallel_size=3 does not divide ranks_per_replica=4: set one of 1, 2, 4": {
            "ranks_per_replica": 4,
            "tensor_parallel_size": 3,
        },
    }
    for says, sizes in wrong.items():
        for strategy in (DeARStrategy, LocalSGDStrategy):
            assert_refused({says: raised(partial(strategy, **sizes))})
    for fabric in (DeARFabricStrategy, LocalSGDFabricStrategy):
        says = "parallelize_fn shards a model among the ranks of a replica, and ranks_per_replica=1"
        assert_refused({says: raised(partial(fabric, parallelize_fn=parallelize))})
    with pytest.raises(RuntimeError, match="ranks_per_replica is 1"):
        DeARStrategy().device_mesh  # noqa: B018
