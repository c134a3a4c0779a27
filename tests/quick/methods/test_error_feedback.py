"""What a lossy codec drops is sent later by every method, unless ``error_feedback=False``: bit for bit by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync import LocalSGD, ParameterServer
from lightning_pipesync.core.buckets import shard_of
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.pipe_sgd import PipeSGDConfig
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig
from lightning_pipesync.training.registry import METHODS as REGISTRY
from tests.references.pipe_sgd import all_reduce, divided, fused, mean, reduce_scatter, through, two_halves
from tests.references.tree import all_reduce_on_tree, residuals_of_roots
from tests.support.harness import call_on_hosts, on_ranks
from tests.support.models import Run, loss, seeded_mlp

STEPS = 8
METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "dear, sharded": (DeAR, {"update": "sharded", "fusion": "buffer"}),
    "dear, replicated": (DeAR, {"update": "replicated", "fusion": "buffer"}),
    "selsync, parameters": (SelSync, {"delta": 0.0}),
    "selsync, gradients": (SelSync, {"delta": 0.0, "aggregation": "gradients"}),
    "local_sgd": (LocalSGD, {"period": 2, "residual_decay": 1.0}),
    "local_sgd, DiLoCo": (LocalSGD, {"period": 2, "outer_optimizer": "nesterov"}),
    "parameter_server": (ParameterServer, {"policy": "sync"}),
    "parameter_server, one": (ParameterServer, {"policy": "sync", "servers": 1}),
    "dear, sharded, on hosts": (DeAR, {"update": "sharded", "fusion": "buffer"}),
    "dear, replicated, on hosts": (DeAR, {"update": "replicated", "fusion": "buffer"}),
    "selsync, parameters, on hosts": (SelSync, {"delta": 0.0}),
    "selsync, gradients, on hosts": (SelSync, {"delta": 0.0, "aggregation": "gradients"}),
    "dear, on a tree": (DeAR, {"topology": "tree", "fusion": "buffer"}),
    "selsync, parameters, on a tree": (SelSync, {"topology": "tree", "delta": 0.0}),
    "selsync, gradients, on a tree": (SelSync, {"topology": "tree", "delta": 0.0, "aggregation": "gradients"}),
}
ON_HOSTS, ON_A_TREE = {"world_size": 4, "columns": 2}, {"world_size": 3, "columns": 1}


#: The latter is the codec's own outer momentum.
REFUSED = ("local_sgd, DiLoCo", "chunked_topk")


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.5)


def in_order(model: nn.Module, names: Sequence[str]) -> list[Tensor]:
    by_name = dict(model.named_parameters())
    return [by_name[name] for name in names]


def train(method: str, codec: str, feedback: bool) -> tuple[list[str], list[Tensor]]:
    """Returns in which order the parameters travel, and the weights after each step, in that order."""
    kind, settings = METHODS[method]
    # Left out where it is on: that is the default.
    settings = {"compression": codec, **settings, **({} if feedback else {"error_feedback": False})}
    run = Run(kind, lambda model: sgd(model.parameters()), **settings)
    names = [name for name, _ in run.model.named_parameters()][:: -1 if kind in (DeAR, SelSync) else 1]
    weights = []
    for step in range(STEPS):
        run.step(step)
        run.sync.synchronize()
        if kind is DeAR:
            [bucket] = run.sync._fused.buckets
            names = [member.name for member in bucket.members]
        weights.append(fused(in_order(run.model, names)))
    run.sync.detach()
    return names, weights


def residuals(numel: int, world_size: int, columns: int) -> list[list[Tensor]]:
    """Of each host's values, and of each owner's shard."""
    shards = [torch.zeros_like(shard_of(torch.zeros(numel), rank, world_size)) for rank in range(world_size)]
    return [[torch.zeros(numel) for _ in range(world_size // columns)], shards]


def simulate(
    method: str, codec_name: str, feedback: bool, names: Sequence[str], world_size: int = 2, columns: int = 1
) -> list[list[Tensor]]:
    """Returns the weights of each rank after each step."""
    codec, models = get_codec(codec_name), [seeded_mlp() for _ in range(world_size)]
    parameters = [in_order(model, names) for model in models]
    optimizers = [sgd(own) for own in parameters]
    common, on_a_tree = fused(parameters[0]), "on a tree" in method
    on_flat = partial(two_halves if method.startswith("dear") else all_reduce, columns=columns)
    average_of = all_reduce_on_tree if on_a_tree else on_flat
    is_parameter = fused([torch.ones_like(one) for one in parameters[0]]).bool()
    dropped: Any = None
    if feedback:
        dropped = residuals_of_roots(common.numel()) if on_a_tree else residuals(common.numel(), world_size, columns)
    not_sent = torch.zeros_like(common)  # of the updated weights
    shared = nn.Parameter(common.clone())
    outer = SGD([shared], lr=0.7, momentum=0.9, nesterov=True)  # DiLoCo's
    weights = []

    def write(own: Sequence[Tensor], values: Tensor, gradients: bool = False) -> None:
        for tensor, part in zip(own, divided(values, own), strict=True):
            if gradients:
                tensor.grad = part.clone()
            else:
                tensor.data.copy_(part)

    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss(model, step, rank).backward()
        if method.startswith("selsync, parameters") or method.startswith("local_sgd"):
            for optimizer in optimizers:
                optimizer.step()
            moves = [fused(own) - common for own in parameters]
            if method.startswith("local_sgd") and step % 2 == 0:
                weights.append([fused(own) for own in parameters])
                continue
            if method == "local_sgd, DiLoCo":
                shared.data.copy_(common)
                shared.grad = -torch.cat(reduce_scatter(moves, codec, dropped[0] if dropped else None))
                outer.step()
                moved = [shard_of(shared.detach() - common, owner, world_size) for owner in range(world_size)]
                kept = dropped[1] if dropped else [None] * world_size
                common = common + torch.cat([through(codec, *one) for one in zip(moved, kept, strict=True)])
            else:
                common = common + average_of(moves, codec, dropped)
        elif method.startswith("parameter_server"):
            gradients = [fused([p.grad for p in own]) for own in parameters]
            if method == "parameter_server":
                average = torch.cat(reduce_scatter(gradients, codec, dropped[0] if dropped else None))
            else:
                kept = dropped[0] if dropped else [None] * world_size
                average = mean([through(codec, *one) for one in zip(gradients, kept, strict=True)])
            write(parameters[0], average, gradients=True)
            optimizers[0].step()
            common = fused(parameters[0])
        elif method.startswith("dear, sharded"):
            gradients = [fused([p.grad for p in own]) for own in parameters]
            average = torch.cat(reduce_scatter(gradients, codec, dropped[0] if dropped else None, columns))
            write(parameters[0], average, gradients=True)
            write(parameters[0], common + not_sent)
            optimizers[0].step()
            # The optimizer changes parameters, and not what a codec may leave between them.
            updated = torch.where(is_parameter, fused(parameters[0]), common + not_sent)
            moved = [shard_of(updated - common, owner, world_size) for owner in range(world_size)]
            common = common + torch.cat([through(codec, shard, None) for shard in moved])
            not_sent = updated - common if feedback else not_sent
        else:
            average = average_of([fused([p.grad for p in own]) for own in parameters], codec, dropped)
            write(parameters[0], average, gradients=True)
            optimizers[0].step()
            common = fused(parameters[0])
        for own in parameters:
            write(own, common)
        weights.append([fused(own) for own in parameters])  # without what a codec may leave between them
    return weights


@pytest.mark.parametrize(
    ("method", "codec"), [(m, c) for m in METHODS for c in ("fp8", "int8", "int4", "chunked_topk") if (m, c) != REFUSED]
)
@pytest.mark.parametrize("feedback", [True, False])
def test_all_methods_follow_one_rule(method: str, codec: str, feedback: bool) -> None:
    """Pipe-SGD's own reference is that of test_pipe_sgd.py."""
    ranks = {"world_size": 2, "columns": 1}
    for words, others in (("on hosts", ON_HOSTS), ("on a tree", ON_A_TREE)):
        ranks = others if words in method else ranks
    outcomes = on_ranks(call_on_hosts, ranks["world_size"], ranks["columns"], train, method, codec, feedback)
    names, weights = outcomes[0]
    reference = simulate(method, codec, feedback, names, **ranks)
    for rank, (_, of_rank) in enumerate(outcomes):
        for step, (actual, of_step) in enumerate(zip(of_rank, reference, strict=True)):
            expected = of_step[rank]
            assert torch.equal(actual, expected), f"step {step}: off by {(actual - expected).abs().max()}"
    other = simulate(method, codec, not feedback, names, **ranks)
    assert not torch.equal(weights[-1], other[-1][0]), "the setting makes no difference"


def test_every_method_with_a_codec_is_compared() -> None:
    wires = {name for name, method in REGISTRY.items() if "compression" in method.config_type.__dataclass_fields__}
    compared = {case.partition(",")[0] for case in METHODS}
    assert compared == wires - {"ea_pipe", "pipe_sgd"}, "which sends activations; which has a test of its own"


@pytest.mark.parametrize("config_type", [DeARConfig, PipeSGDConfig, SelSyncConfig])
def test_residuals_need_as_many_ranks(config_type: Any) -> None:
    own_replicas = config_type is SelSyncConfig
    assert config_type().needs_as_many_ranks == own_replicas, "nothing is dropped"
    assert config_type(error_feedback=False).needs_as_many_ranks == own_replicas
    assert config_type(compression="int8").needs_as_many_ranks
    assert config_type(compression="int8", error_feedback=False).needs_as_many_ranks == own_replicas
    assert copy.deepcopy(config_type(compression="bf16")).error_feedback
