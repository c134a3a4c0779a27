"""Local SGD with ranks that are lost, or come, in one process, with plain tensors: a round is of those there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.references.local_sgd import Result, apply, exchange, members
from tests.references.selsync import average

#: A flat buffer has each tensor at a multiple of so many values: 64 bytes of fp32.
ALIGNED = 16


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    world_size: int,
    num_steps: int,
    period: int,
    lost: Mapping[int, int],
    participation: float = 1.0,
    make_outer: Callable[[list[Tensor], int], Optimizer] | None = None,
    elastic: float = 0.0,
    average_states: bool = False,
    overlap_steps: int = 0,
    mixing_factor: float = 0.0,
    dropped: Collection[int] = (),
    absent: Collection[int] = (),
    back: Mapping[int, int] = MappingProxyType({}),
    leaving: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, nn.Module]:
    """Returns the replicas of the ranks that are left.

    `lost` has the ranks that the average of a step, or a later one, is without, each with that step; `back` those that
    come after a step, of which those in `absent` were not there before. `make_outer` gets the number of ranks; the
    elastic force is `elastic` divided by it. The averages of the steps `dropped` were under way when a rank was lost.
    `leaving` has the ranks whose last average is that of a step: of their state nothing is lost.
    """
    replicas = {rank: copy.deepcopy(model) for rank in range(world_size) if rank not in absent}
    optimizers = {rank: make_optimizer(replica) for rank, replica in replicas.items()}
    global_model = copy.deepcopy(model)
    weights = list(global_model.parameters())
    names = [name for name, _ in model.named_parameters()]
    outer = make_outer(weights, len(replicas)) if make_outer else None
    arriving: dict[int, Result] = {}
    for step in range(1, num_steps + 1):
        for rank in [rank for rank, when in back.items() if when == step - 1]:
            first = min(replicas)
            replicas = dict(sorted({**replicas, rank: copy.deepcopy(replicas[first])}.items()))
            optimizers[rank] = make_optimizer(replicas[rank])
            optimizers[rank].load_state_dict(copy.deepcopy(optimizers[first].state_dict()))
        for rank, replica in replicas.items():
            optimizers[rank].zero_grad()
            loss(replica, step - 1, rank).backward()
            optimizers[rank].step()
        present = list(replicas.values())
        if overlap_steps and step in arriving:
            apply(present, [arriving[step]] * len(present), present, mixing_factor)
        if step % period:
            continue
        ranks = sorted(replicas)
        lost_before = [rank for rank in ranks if lost.get(rank, num_steps + 1) <= step]
        gone = [rank for rank in lost_before if not lost[rank] <= back.get(rank, -1) < step]
        if gone and outer is not None and make_outer is not None:
            shards = [(ranks.index(rank), len(ranks)) for rank in gone]
            outer = with_lost_shards(outer, make_outer(weights, len(ranks) - len(gone)), weights, shards)
        for rank in gone:
            del replicas[rank], optimizers[rank]
        if step in dropped:
            continue
        present = list(replicas.values())
        drawn = members("all", max(1, int(participation * len(present) + 1e-9)), len(present), (step - 1) // period)
        results = exchange(present, global_model, names, outer, drawn, elastic / len(present))
        if overlap_steps:
            arriving[step + overlap_steps] = results[0]
        else:
            apply(present, results, present, 0.0)
        average([list(replica.buffers()) for replica in present])
        if average_states:
            average([momentum_of(optimizers[rank], replicas[rank]) for rank in replicas])
        for rank in [rank for rank, when in leaving.items() if when == step]:
            del replicas[rank], optimizers[rank]
            if outer is not None and make_outer is not None and replicas:
                outer = with_lost_shards(outer, make_outer(weights, len(replicas)), weights, [])
    return replicas


def momentum_of(optimizer: Optimizer, model: nn.Module) -> list[Tensor]:
    return [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]


def with_lost_shards(
    before: Optimizer, after: Optimizer, weights: Sequence[Tensor], shards: Sequence[tuple[int, int]]
) -> Optimizer:
    """Returns the optimizer `after` with the state of `before`, which is zero in shards: each an index, of how many."""
    starts = [0]
    for p in weights:
        starts.append(starts[-1] + -(-p.numel() // ALIGNED) * ALIGNED)
    for p, start in zip(weights, starts, strict=False):
        for name, value in before.state[p].items():
            if isinstance(value, Tensor) and value.dim():
                flat = torch.zeros(starts[-1])
                flat[start : start + p.numel()] = value.flatten()
                for index, number in shards:
                    size = -(-starts[-1] // number)
                    flat[index * size : (index + 1) * size] = 0
                value.copy_(flat[start : start + p.numel()].view_as(p))
            after.state[p][name] = value
    return after
