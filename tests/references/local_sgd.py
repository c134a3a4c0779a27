"""Periodic averaging in one process, with plain tensors: FedAvg, post-local SGD, DiLoCo, EASGD, streaming, gossip."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.references.selsync import average, mean

#: What a replica goes on from, by the name of a parameter.
Result = dict[str, Tensor]


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
    neighbors: str = "all",
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
    of a group later, the weights of `participants` replicas, or of `neighbors`, in a round. With `overlap_steps` an
    average arrives so much later: with 1, a period of 1 and neighbors it is D-PSGD (Lian et al. 2017, Algorithm 1),
    X <- X W - gamma dF(X). After the step `goes_on_after` the replicas go on from their average.
    """
    replicas = [copy.deepcopy(model) for _ in range(world_size // group_size)]
    optimizers = [make_optimizer(replica) for replica in replicas]
    global_model = copy.deepcopy(model)
    pieces = fragments or [[name for name, _ in model.named_parameters()]]
    outer = [make_outer([global_model.get_parameter(n) for n in piece]) if make_outer else None for piece in pieces]
    arriving: dict[tuple[int, int], list[Result]] = {}  # by step and fragment
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
        averages_with = members(neighbors, participants, len(replicas), (step - 1) // period)
        for f, piece in enumerate(pieces):
            if overlap_steps and (step, f) in arriving:
                apply(replicas, arriving.pop((step, f)), starts[f], mixing_factor)
            if is_due(step, period, f, len(pieces)):
                starts[f] = copy.deepcopy(replicas)
                results = exchange(replicas, global_model, piece, outer[f], averages_with, elastic_force)
                arriving[step + overlap_steps, f] = results
            if not overlap_steps and (step, f) in arriving:
                apply(replicas, arriving.pop((step, f)), replicas, 0.0)
        if step % period == 0:
            mix_buffers(replicas, averages_with if neighbors != "all" else None)
    return replicas, global_model


def is_due(step: int, period: int, fragment: int = 0, fragments: int = 1) -> bool:
    """Streaming DiLoCo: fragments at equal distances, the last one at the end of the period."""
    return step % period == (fragment + 1) * period // fragments % period


def members(neighbors: str, participants: int | None, number: int, round_: int) -> list[list[int]]:
    """Returns by replica whose weights it averages: where a row of the mixing matrix W is not zero."""
    if neighbors == "ring":
        return [sorted({(i - 1) % number, i, (i + 1) % number}) for i in range(number)]
    drawn = random.Random(round_)
    if neighbors == "random_pairs":  # of an odd number, the last one is alone
        order = drawn.sample(range(number), number)
        pairs = [sorted(order[k : k + 2]) for k in range(0, number, 2)]
        return [next(pair for pair in pairs if i in pair) for i in range(number)]
    return [sorted(drawn.sample(range(number), participants or number))] * number  # FedAvg: a random subset


@torch.no_grad()
def exchange(
    replicas: Sequence[nn.Module],
    global_model: nn.Module,
    piece: Sequence[str],
    outer: Optimizer | None,
    averages_with: Sequence[Sequence[int]],
    elastic_force: float,
) -> list[Result]:
    """Averages a fragment of the replicas, and moves the global weights; returns what each replica continues from."""
    results: list[Result] = [{} for _ in replicas]
    for name in piece:
        own = [replica.get_parameter(name) for replica in replicas]
        weights = global_model.get_parameter(name)
        if outer is None:  # FedAvg, gossip
            for result, others in zip(results, averages_with, strict=True):
                result[name] = mean([own[i] for i in others])
            continue
        movements = [p - weights for p in own]
        weights.grad = -mean(movements)  # DiLoCo, Algorithm 1, line 12: the outer gradient
        for p, movement in zip(own, movements, strict=True):  # EASGD, Eq. 5
            p.add_(movement, alpha=-elastic_force)
    if outer is not None:
        outer.step()  # line 14; EASGD, Eq. 6 with a learning rate of ranks times force
        if not elastic_force:
            results = [{name: global_model.get_parameter(name).clone() for name in piece}] * len(replicas)
    return results


@torch.no_grad()
def apply(
    replicas: Sequence[nn.Module], results: Sequence[Result], starts: Sequence[nn.Module], mixing_factor: float | str
) -> None:
    """Streaming DiLoCo, Eq. 3: blends a rank's own weights and the average.

    With "progress" as CoCoD-SGD, Algorithm 1: the average, and what a rank has moved since.
    """
    for replica, result, start in zip(replicas, results, starts, strict=True):
        for name, value in result.items():
            p = replica.get_parameter(name)
            if mixing_factor == "progress":
                p.add_(value - start.get_parameter(name))
            else:
                p.copy_(torch.lerp(p, value, 1 - float(mixing_factor)) if mixing_factor else value)


@torch.no_grad()
def mix_buffers(replicas: Sequence[nn.Module], averages_with: Sequence[Sequence[int]] | None) -> None:
    """Averages the buffers of all; or with neighbors, where those that are no fractions stay a replica's own."""
    if averages_with is None:
        return average([list(replica.buffers()) for replica in replicas])
    before = copy.deepcopy([dict(replica.named_buffers()) for replica in replicas])
    for replica, others in zip(replicas, averages_with, strict=True):
        for name, buffer in replica.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(mean([before[i][name] for i in others]))


@torch.no_grad()
def go_on_from_average(replicas: Sequence[nn.Module], starts: dict[int, list[nn.Module]]) -> None:
    """Averages the replicas; what that moves a replica by is no progress since an average has started."""
    before = copy.deepcopy(replicas)
    average_where_different(replicas)
    for of_fragment in starts.values():
        for start, replica, own in zip(of_fragment, replicas, before, strict=True):
            for moved, to, of in zip(start.parameters(), replica.parameters(), own.parameters(), strict=True):
                moved.add_(to - of)


def average_where_different(replicas: Sequence[nn.Module]) -> None:
    """Averages the replicas, if they differ: the mean of equal values might be rounded."""
    for tensors in ([list(r.parameters()) for r in replicas], [list(r.buffers()) for r in replicas]):
        if not all(torch.equal(*pair) for one in tensors for pair in zip(tensors[0], one, strict=True)):
            average(tensors)
