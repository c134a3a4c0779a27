"""Replicas that average with neighbors, in one process, with plain tensors: D-PSGD, and gossip of random pairs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.references.selsync import mean
from tests.support.models import state


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    neighbors: str,
    world_size: int,
    num_steps: int,
    period: int,
    overlap_steps: int = 0,
    fragments: Sequence[Sequence[str]] | None = None,
) -> list[list[dict[str, Tensor]]]:
    """Returns the state of each replica after each step: X <- (X - gamma dF(X)) W at the end of a period.

    With ``overlap_steps`` the average of X begins there, and that many steps later takes the place of the X from which
    it began: with 1, and a period of 1, X <- X W - gamma dF(X), as in D-PSGD (Lian et al. 2017, Algorithm 1).
    """
    replicas = [copy.deepcopy(model) for _ in range(world_size)]
    optimizers = [make_optimizer(replica) for replica in replicas]
    pieces = fragments or [[name for name, _ in model.named_parameters()]]
    moves: dict[int, list[dict[str, Tensor]]] = {}  # by step: what the averages that arrive then move each replica by
    states = []
    for step in range(1, num_steps + 1):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            replica.zero_grad()
            loss(replica, step - 1, rank).backward()
            optimizer.step()
        with torch.no_grad():
            for replica, moved in zip(replicas, moves.pop(step, []), strict=False):
                for name, difference in moved.items():
                    replica.get_parameter(name).add_(difference)
            members = of_round(neighbors, world_size, (step - 1) // period)
            for f, piece in enumerate(pieces):
                if step % period != (f + 1) * period // len(pieces) % period:
                    continue
                before = [{name: replica.get_parameter(name).clone() for name in piece} for replica in replicas]
                after = [{name: mean([before[j][name] for j in members[i]]) for name in piece} for i in members]
                if overlap_steps:
                    due = moves.setdefault(step + overlap_steps, [{} for _ in replicas])
                    for i, moved in enumerate(due):
                        moved |= {name: after[i][name] - before[i][name] for name in piece}
                for replica, values in zip(replicas, after, strict=True):
                    for name, value in values.items() if not overlap_steps else ():
                        replica.get_parameter(name).copy_(value)
            if step % period == 0:
                mix_buffers(replicas, members)
        states.append([state(replica) for replica in replicas])
    return states


def of_round(neighbors: str, number: int, round_: int) -> dict[int, list[int]]:
    """Returns by replica whose weights it averages: where a row of W is not zero."""
    if neighbors == "ring":
        return {i: sorted({(i - 1) % number, i, (i + 1) % number}) for i in range(number)}
    order = random.Random(round_).sample(range(number), number)
    pairs = [sorted(order[k : k + 2]) for k in range(0, number, 2)]  # of an odd number, the last one is alone
    return {i: next(pair for pair in pairs if i in pair) for i in range(number)}


def mix_buffers(replicas: Sequence[nn.Module], members: dict[int, list[int]]) -> None:
    """Averages the buffers with fractions as the weights are; others, such as counters, stay a replica's own."""
    buffers = [dict(replica.named_buffers()) for replica in replicas]
    before = copy.deepcopy(buffers)
    for i, own in enumerate(buffers):
        for name, buffer in own.items():
            if buffer.is_floating_point():
                buffer.copy_(mean([before[j][name] for j in members[i]]))
