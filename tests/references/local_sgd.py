"""Periodic averaging in one process, with plain tensors: FedAvg, post-local SGD, DiLoCo, Streaming DiLoCo, EASGD."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.references.selsync import average, mean


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    world_size: int,
    num_steps: int,
    period: int,
    warmup_steps: int = 0,
    participants: int | None = None,
    make_outer: Callable[[list[Tensor]], Optimizer] | None = None,
    fragments: Sequence[Sequence[str]] | None = None,
    overlap_steps: int = 0,
    mixing_factor: float | str = 0.0,
    elastic_force: float = 0.0,
    group_size: int = 1,
    goes_on_after: int | None = None,
) -> tuple[list[nn.Module], nn.Module]:
    """Returns the replicas, one for each group of ranks, and the global weights.

    `fragments` are the names of the parameters of each; the gradients of all ranks are averaged in the warm-up, those
    of a group later, the weights of `participants` replicas in a round. After the step `goes_on_after` the replicas go
    on from their average.
    """
    replicas = [copy.deepcopy(model) for _ in range(world_size // group_size)]
    optimizers = [make_optimizer(replica) for replica in replicas]
    global_model = copy.deepcopy(model)
    pieces = fragments or [[name for name, _ in model.named_parameters()]]
    outer = [
        make_outer([global_model.get_parameter(name) for name in piece]) if make_outer else None for piece in pieces
    ]
    arriving: dict[tuple[int, int], dict[str, Tensor]] = {}  # by step and fragment
    starts: dict[int, list[nn.Module]] = {}  # the replicas when the average of a fragment started
    for step in range(1 - warmup_steps, num_steps - warmup_steps + 1):
        if step - 1 == goes_on_after:
            go_on_from_average(replicas, starts)
        gradients = []  # by rank
        for rank in range(world_size):
            replica = replicas[rank // group_size]
            replica.zero_grad()
            loss(replica, step - 1 + warmup_steps, rank).backward()
            gradients.append([p.grad for p in replica.parameters()])
        for n, replica in enumerate(replicas):
            group = slice(n * group_size, (n + 1) * group_size)
            averaged = gradients if step <= 0 else gradients[group]  # post-local SGD: all, at first
            for p, *values in zip(replica.parameters(), *averaged, strict=True):
                p.grad = mean(values)
            optimizers[n].step()
        if step == 0:
            global_model.load_state_dict(replicas[0].state_dict())
        if step <= 0:
            continue
        with torch.no_grad():
            for f, piece in enumerate(pieces):
                if overlap_steps and (step, f) in arriving and mixing_factor == "progress":
                    add_progress(replicas, arriving.pop((step, f)), starts[f])
                elif overlap_steps and (step, f) in arriving:
                    apply(replicas, arriving.pop((step, f)), float(mixing_factor))
                if step % period == (f + 1) * period // len(pieces) % period:
                    starts[f] = copy.deepcopy(replicas)
                    ranks = chosen(participants, len(replicas), step, period)
                    result = exchange(replicas, global_model, piece, outer[f], ranks, elastic_force)
                    arriving[step + overlap_steps, f] = {} if elastic_force else result
                if not overlap_steps and (step, f) in arriving:
                    apply(replicas, arriving.pop((step, f)), 0.0)
            if step % period == 0:
                average([list(replica.buffers()) for replica in replicas])
    return replicas, global_model


@torch.no_grad()
def go_on_from_average(replicas: Sequence[nn.Module], starts: dict[int, list[nn.Module]]) -> None:
    """Averages the replicas; what that moves a replica by is no progress since an average has started."""
    before = copy.deepcopy(replicas)
    average_where_different(replicas)
    for of_fragment in starts.values():
        for start, replica, own in zip(of_fragment, replicas, before, strict=True):
            for moved, to, of in zip(start.parameters(), replica.parameters(), own.parameters(), strict=True):
                moved.add_(to - of)


@torch.no_grad()
def average_where_different(replicas: Sequence[nn.Module]) -> None:
    """Averages the replicas, if they differ: the mean of equal values might be rounded."""
    for tensors in ([list(r.parameters()) for r in replicas], [list(r.buffers()) for r in replicas]):
        if not all(torch.equal(*pair) for one in tensors for pair in zip(tensors[0], one, strict=True)):
            average(tensors)


def chosen(participants: int | None, number: int, step: int, period: int) -> list[int]:
    """FedAvg: a random subset of the replicas, another one in each round."""
    if participants is None:
        return list(range(number))
    return sorted(random.Random((step - 1) // period).sample(range(number), participants))


def exchange(
    replicas: Sequence[nn.Module],
    global_model: nn.Module,
    piece: Sequence[str],
    outer: Optimizer | None,
    ranks: Sequence[int],
    elastic_force: float,
) -> dict[str, Tensor]:
    """Averages a fragment of the replicas, and moves the global weights; returns what the replicas continue from."""
    result = {}
    for name in piece:
        weights = global_model.get_parameter(name)
        own = [replica.get_parameter(name) for replica in replicas]
        if outer is None:  # FedAvg
            total = sum(p.detach() if n in ranks else torch.zeros_like(p) for n, p in enumerate(own))
            result[name] = total / len(ranks)
        else:  # DiLoCo, Algorithm 1, line 12: the outer gradient
            movements = [p.detach() - weights for p in own]
            weights.grad = -mean(movements)
            for p, movement in zip(own, movements, strict=True):  # EASGD, Eq. 5
                p.add_(movement, alpha=-elastic_force)
    if outer is not None:
        outer.step()  # line 14; EASGD, Eq. 6 with a learning rate of ranks times force
        result = {name: global_model.get_parameter(name).detach().clone() for name in piece}
    return result


def apply(replicas: Sequence[nn.Module], result: dict[str, Tensor], mixing_factor: float) -> None:
    """Streaming DiLoCo, Eq. 3: blends a rank's own weights and the global ones."""
    for name, value in result.items():
        for replica in replicas:
            parameter = replica.get_parameter(name)
            parameter.copy_(torch.lerp(parameter, value, 1 - mixing_factor) if mixing_factor else value)


def add_progress(replicas: Sequence[nn.Module], result: dict[str, Tensor], starts: Sequence[nn.Module]) -> None:
    """CoCoD-SGD, Algorithm 1: the average, and what a rank has moved since."""
    for name, value in result.items():
        for replica, start in zip(replicas, starts, strict=True):
            replica.get_parameter(name).add_(value - start.get_parameter(name))
