"""Which method trains which models, where ranks reference other wrappers or something is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from lightning_pipesync import DeAR
from lightning_pipesync.fabric import DeARFabricStrategy, SelSyncFabricStrategy
from tests.support.harness import on_ranks, raised


def fabric_of(strategy: Any) -> Fabric:
    os.environ["WORLD_SIZE"] = "2"  # which a teardown removes, as with any strategy
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def trained(fabric: Fabric, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()


class EqualSequential(nn.Sequential):
    """Equal to every other one, and as hashable as torch asks."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualSequential)

    __hash__ = nn.Sequential.__hash__


class EqualSGD(SGD):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualSGD)

    __hash__ = SGD.__hash__


def equal_models_and_optimizers_are_different_ones() -> bool:
    fabric = fabric_of(DeARFabricStrategy())
    prepared = []
    for _ in range(2):
        net = EqualSequential(nn.Linear(4, 2))
        prepared.append((net, *fabric.setup(net, EqualSGD(net.parameters(), lr=0.1))))
    methods = [fabric.strategy.method_of(optimizer) for _, _, optimizer in prepared]
    assert all(method._module is net for method, (net, *_) in zip(methods, prepared, strict=True))
    assert methods[0] is not methods[1]
    for _, model, optimizer in prepared:
        trained(fabric, model, optimizer)
    net, *_ = prepared.pop(0)
    trained(fabric, *fabric.setup(net, EqualSGD(net.parameters(), lr=0.1)))  # ends the first method, not the second
    assert fabric.strategy.method_of(prepared[0][2]) is methods[1]
    fabric.strategy.teardown()
    return True


def a_refused_optimizer_is_forgotten() -> bool:
    fabric, net = fabric_of(SelSyncFabricStrategy()), layers()
    assert "LBFGS" in (raised(lambda: fabric.setup(net, LBFGS(net.parameters()))) or ("", ""))[1]
    trained(fabric, *fabric.setup(net, SGD(net.parameters(), lr=0.1)))
    fabric.strategy.teardown()
    return True


def a_refused_optimizer_leaves_the_others_alone() -> bool:
    fabric, net = fabric_of(DeARFabricStrategy()), layers()
    model, optimizer = fabric.setup(net, SGD(net[0].parameters(), lr=0.1))
    assert raised(lambda: fabric.setup_optimizers(LBFGS(net[1].parameters())))
    trained(fabric, model, optimizer)
    fabric.strategy.teardown()
    return True


def a_wrapper_is_held_on_one_rank() -> bool:
    """The same model is set up again, and a submodule beside it; rank 1 references neither wrapper."""
    fabric, net = fabric_of(SelSyncFabricStrategy(timeout_s=30)), layers()
    held = [fabric.setup(net, SGD(net.parameters(), lr=0.1)), fabric.setup_module(net[0])]
    if fabric.global_rank == 1:
        held.clear()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    trained(fabric, model, optimizer)
    method = fabric.strategy.method_of(optimizer)
    trained(fabric, *fabric.setup(other := layers(), SGD(other.parameters(), lr=0.1)))
    assert fabric.strategy.method_of(optimizer) is method
    assert [name for name, _ in method._module.named_parameters()] == [name for name, _ in net.named_parameters()]
    fabric.strategy.teardown()
    return True


def a_failed_load_leaves_the_training_alone() -> bool:
    fabric, net = fabric_of(DeARFabricStrategy()), layers()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    assert raised(lambda: fabric.load("no such file", {"model": model, "optimizer": optimizer}))
    trained(fabric, model, optimizer)
    fabric.strategy.teardown()
    return True


def buffers_are_consolidated_each_time() -> Tensor:
    fabric = fabric_of(DeARFabricStrategy())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, _ = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    with fabric.strategy.consolidated():
        pass
    torch.manual_seed(fabric.global_rank)
    model(torch.randn(8, 4))
    with fabric.strategy.consolidated():
        return net[1].running_mean.clone()


def closures_of_two_optimizers() -> bool:
    fabric, net = fabric_of(DeARFabricStrategy()), layers()
    model, *optimizers = fabric.setup(net, *(SGD(layer.parameters(), lr=0.1) for layer in net))
    for optimizer in optimizers * 2:

        def closure() -> Tensor:
            model.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            fabric.backward(loss)
            return loss

        optimizer.step(closure)
    fabric.strategy.teardown()
    return True


CASES: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        a_refused_optimizer_is_forgotten,
        a_refused_optimizer_leaves_the_others_alone,
        a_wrapper_is_held_on_one_rank,
        a_failed_load_leaves_the_training_alone,
        closures_of_two_optimizers,
        equal_models_and_optimizers_are_different_ones,
        buffers_are_consolidated_each_time,
    )
}


def all_cases() -> dict[str, Any]:
    return {name: case() for name, case in CASES.items()}


def test_sessions_of_fabric() -> None:
    first, second = on_ranks(all_cases, 2, init=False)
    assert torch.equal(
        first.pop("buffers_are_consolidated_each_time"), second.pop("buffers_are_consolidated_each_time")
    )
    assert all(first.values())
    assert all(second.values())


def clipped_and_unscaled() -> float:
    """What is clipped before it is unscaled is unscaled; a refused method leaves the optimizer to the user."""
    net = nn.Linear(4, 2, bias=False)
    optimizer = SGD(net.parameters(), lr=1.0)
    assert raised(lambda: DeAR(net, optimizer, topology="torus2d", torus_columns=7))
    optimizer.step()
    sync = DeAR(net, optimizer)
    before = net.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(net(torch.ones(1, 4)).sum()).backward()
    sync.reduce(scaler=scaler, unscale=False)
    sync.clip(1e9)
    scaler.unscale_(optimizer)
    sync.reduce(scaler=scaler)
    sync.step(lambda: scaler.step(optimizer))
    sync.synchronize()
    dist.barrier()
    sync.detach()
    return (before - net.weight).abs().max().item()


def test_a_gradient_may_be_clipped_before_it_is_unscaled() -> None:
    assert on_ranks(clipped_and_unscaled, 2) == [1.0] * 2
