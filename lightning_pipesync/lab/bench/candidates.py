"""The candidates of the benchmark of a training step: registered methods, and their alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.lab.bench.candidate import (
    LEARNING_RATE,
    MOMENTUM,
    MakeCandidate,
    Wrapped,
    lab_of,
    make_candidate,
)
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.named_settings import parse_settings, split_method, unknown_method
from lightning_pipesync.training.registry import METHODS

#: The way out for methods that nobody has registered.
OWN_METHODS = "For a method of yours: pipesync --import MODULE ..., which names the module that registers it."

#: The name of the step without communication.
ALONE = "no communication"

#: The name of what methods between replicas in shards are compared with.
HSDP = "FSDP2 on both (HSDP)"


def ddp_name(bucket_mb: float) -> str:
    return f"DDP, {bucket_mb:g} MiB"


def without_communication(model: BenchModel) -> Wrapped:
    """Each rank trains by itself: the time of computation alone, the limit of all methods."""
    return Wrapped(ALONE, model, model.module, "compute")


def ddp(model: BenchModel, bucket_mb: float) -> Wrapped:
    """``DistributedDataParallel``, which hides the all-reduce under backward."""
    return Wrapped(ddp_name(bucket_mb), model, in_ddp(model.module, bucket_mb), "baseline")


def fsdp2(model: BenchModel, reshard: bool = False) -> Wrapped:
    """FSDP2: reduce-scatter and all-gather, as in DeAR; with ``reshard`` one more all-gather, before backward."""
    mesh = init_device_mesh(device_of(model.module).type, (dist.get_world_size(),))
    return Wrapped(
        "FSDP2, resharded" if reshard else "FSDP2", model, sharded(model, mesh, reshard).module, "two_halves"
    )


def sharded(model: BenchModel, mesh: DeviceMesh, reshard: bool = False) -> BenchModel:
    """Returns the model, whose layers FSDP2 shards along ``mesh``; along the second of two dimensions (HSDP)."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model.module, mesh=mesh, reshard_after_forward=False)
    return model


def hsdp(model: BenchModel) -> Wrapped:
    """A model that FSDP2 has sharded along both dimensions: what methods between replicas are compared with."""
    return Wrapped(HSDP, model, model.module, "baseline")


def zero(model: BenchModel, bucket_mb: float) -> Wrapped:
    """DDP with ``ZeroRedundancyOptimizer``: each rank updates its part, and broadcasts it."""
    module = in_ddp(model.module, bucket_mb)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=LEARNING_RATE, momentum=MOMENTUM)
    return Wrapped("DDP + ZeRO-1", model, module, "baseline", optimizer)


#: By name what this package's methods are compared with: a function of the bucket sizes in MiB.
ALTERNATIVES: dict[str, Callable[[Sequence[float]], list[MakeCandidate]]] = {
    "ddp": lambda sizes: [partial(ddp, bucket_mb=size) for size in sizes],
    "fsdp2": lambda _: [fsdp2],
    "fsdp2_resharded": lambda _: [partial(fsdp2, reshard=True)],
    "zero": lambda sizes: [partial(zero, bucket_mb=sizes[0])],
}


def compared() -> tuple[str, ...]:
    """Returns what is compared if the user names no methods."""
    return ("ddp", "fsdp2", "zero", *(name for name in METHODS if lab_of(name).compared_by_step))


def makers(methods: Sequence[str], bucket_mb: Sequence[float], **arguments: Any) -> list[MakeCandidate]:
    """Returns factories of candidates for each method, and of :data:`ALTERNATIVES` for each bucket size in MiB.

    A method is ``NAME`` or ``NAME:SETTING=VALUE,...``; ``arguments`` are further ones of each. Calling a factory is
    collective. ValueError if a method or a setting is unknown.
    """
    if not methods:
        raise ValueError("methods must name something to compare.")
    makers: list[MakeCandidate] = []
    for text in methods:
        name, preset, chosen = split_method(text)
        if text in ALTERNATIVES:
            makers += ALTERNATIVES[text](bucket_mb)
            continue
        if name not in METHODS:
            raise unknown_method(name, [*METHODS, *ALTERNATIVES], f" {OWN_METHODS}")
        entry = lab_of(name)
        shown = [*([text.partition(":")[0]] if preset else []), *filter(None, chosen.split(","))]
        label = f"{entry.label} ({', '.join(shown)})" if shown else entry.label
        settings = {**preset, **parse_settings(text, METHODS[name].config_type)}
        try:
            declared = entry.bench_candidates(label, settings, bucket_mb)
        except TypeError as error:
            raise ValueError(f"methods: a value in {text!r} is of the wrong type ({error}).") from error
        makers += [make_candidate(name, one, **arguments) for one in declared]
    return makers


def in_ddp(module: nn.Module, bucket_mb: float) -> DistributedDataParallel:
    """Returns the module in DDP, with the settings that its documentation recommends for speed."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True)
