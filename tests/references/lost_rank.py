"""Local SGD with ranks that are lost, or come, in one process, with plain tensors: a round is of those there."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.lab.drill.simulation import with_lost_shards
from tests.references.selsync import average, mean


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    world_size: int,
    num_steps: int,
    period: int,
    lost: dict[int, int],
    participation: float = 1.0,
    make_outer: Callable[[list[Tensor], int], Optimizer] | None = None,
    elastic: float = 0.0,
    average_states: bool = False,
    overlap_steps: int = 0,
    mixing_factor: float = 0.0,
    dropped: Collection[int] = (),
    flushes: Collection[int] = (),
    back: Mapping[int, int] = MappingProxyType({}),
    leaving: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, nn.Module]:
    """Returns the replicas of the ranks that are left.

    `lost` has the ranks that the average of a step, or a later one, is without, each with that step; `make_outer` gets
    the number of ranks; the elastic force is `elastic` divided by it. The averages of the steps `dropped` were under
    way when a rank was lost. `leaving` has the ranks whose last average is that of a step: of their state nothing is
    lost.
    """
    replicas = {rank: copy.deepcopy(model) for rank in range(world_size)}
    optimizers = {rank: make_optimizer(replica) for rank, replica in replicas.items()}
    global_model = copy.deepcopy(model)
    weights = list(global_model.parameters())
    outer = make_outer(weights, world_size) if make_outer else None
    arriving: dict[int, list[Tensor]] = {}
    for step in range(1, num_steps + 1):
        if step - 1 in flushes and (step - 1) % period:  # otherwise they are the same
            average([list(replica.parameters()) for replica in replicas.values()])
            average([list(replica.buffers()) for replica in replicas.values()])
        for rank in [rank for rank, when in back.items() if when == step - 1]:
            first = min(replicas)
            replicas = dict(sorted({**replicas, rank: copy.deepcopy(replicas[first])}.items()))
            optimizers[rank] = make_optimizer(replicas[rank])
            optimizers[rank].load_state_dict(copy.deepcopy(optimizers[first].state_dict()))
        for rank, replica in replicas.items():
            optimizers[rank].zero_grad()
            loss(replica, step - 1, rank).backward()
            optimizers[rank].step()
        if overlap_steps and step in arriving:
            blend(replicas.values(), arriving[step], mixing_factor)
        if step % period:
            continue
        ranks = sorted(replicas)
        gone = [rank for rank in ranks if lost.get(rank, num_steps + 1) <= step <= back.get(rank, num_steps)]
        if gone and outer is not None and make_outer is not None:
            shards = [(ranks.index(rank), len(ranks)) for rank in gone]
            outer = with_lost_shards(outer, make_outer(weights, len(ranks) - len(gone)), weights, shards)
        for rank in gone:
            del replicas[rank], optimizers[rank]
        if step in dropped:
            continue
        force = elastic / len(replicas)
        exchange(list(replicas.values()), global_model, outer, participation, force, (step - 1) // period)
        if overlap_steps:
            arriving[step + overlap_steps] = [p.detach().clone() for p in weights]
        elif not force:
            blend(replicas.values(), weights, 0.0)
        average([list(replica.buffers()) for replica in replicas.values()])
        if average_states:
            average([momentum_of(optimizers[rank], replicas[rank]) for rank in replicas])
        for rank in [rank for rank, when in leaving.items() if when == step]:
            del replicas[rank], optimizers[rank]
            if outer is not None and make_outer is not None and replicas:
                outer = with_lost_shards(outer, make_outer(weights, len(replicas)), weights, [])
    return replicas


@torch.no_grad()
def exchange(
    replicas: Sequence[nn.Module],
    global_model: nn.Module,
    outer: Optimizer | None,
    participation: float,
    force: float,
    round_: int,
) -> None:
    """Moves the global weights, and has them attract the replicas."""
    number = max(1, int(participation * len(replicas) + 1e-9))
    drawn = random.Random(round_).sample(range(len(replicas)), number) if number < len(replicas) else range(number)
    for weights, *own in zip(global_model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
        if outer is None:  # FedAvg
            weights.copy_(sum(p if n in drawn else torch.zeros_like(p) for n, p in enumerate(own)) / number)
        else:  # DiLoCo, Algorithm 1, line 12; EASGD, Eq. 5
            movements = [p - weights for p in own]
            weights.grad = -mean(movements)
            for p, movement in zip(own, movements, strict=True):
                p.add_(movement, alpha=-force)
    if outer is not None:
        outer.step()


@torch.no_grad()
def blend(replicas: Collection[nn.Module], values: Sequence[Tensor], mixing_factor: float) -> None:
    """Streaming DiLoCo, Eq. 3: blends a rank's own weights and the global ones."""
    for replica in replicas:
        for p, value in zip(replica.parameters(), values, strict=True):
            p.copy_(torch.lerp(p, value, 1 - mixing_factor) if mixing_factor else value)


def momentum_of(optimizer: Optimizer, model: nn.Module) -> list[Tensor]:
    return [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
