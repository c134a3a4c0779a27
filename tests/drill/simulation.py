"""What replicas that come and go are to compute: local SGD in one process, with plain tensors.

It is given who took part in each section, and who was taken in after it, and does what the paper says (DiLoCo,
Algorithm 1; without an outer optimizer FedAvg): local steps on a replica's share of the data, then the average of those
that took part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: A flat buffer has each tensor at a multiple of so many values: 64 bytes of fp32.
ALIGNED = 16

MakeOuter = Callable[[list[Tensor], int], Optimizer]


@dataclass(frozen=True)
class Section:
    """What replicas did together after so many steps: who took part, who was new after it, and who has left with it."""

    step: int
    took_part: tuple[str, ...]
    new: tuple[str, ...] = ()
    ends: bool = False
    left: tuple[str, ...] = ()

    @property
    def present(self) -> list[str]:
        return sorted({*self.took_part, *self.new}.difference(self.left))


@dataclass
class Replica:
    model: nn.Module
    optimizer: Optimizer


@dataclass
class Simulation:
    """Local SGD with replicas that come and go.

    Args:
        make_replica: returns a replica of a name with its own weights, before it joins others.
        loss: of a model on samples.
        size, batch_size: of the data set.
        period: H, in steps.
        make_outer: returns the outer optimizer of the global weights for a number of replicas; None: FedAvg.
        average_states: whether the momentum is averaged, too.
    """

    make_replica: Callable[[str], Replica]
    loss: Callable[[nn.Module, list[int]], Tensor]
    size: int
    batch_size: int
    period: int
    make_outer: MakeOuter | None = None
    average_states: bool = False
    replicas: dict[str, Replica] = field(default_factory=dict)

    def run(self, begin: Sequence[str], sections: Sequence[Section], epochs: int) -> dict[str, Replica]:
        """Returns the replicas that are there at the end, by name, in their order."""
        first = self.make_replica(min(begin))
        self.replicas = {name: copy.deepcopy(first) for name in sorted(begin)}
        self._global = copy.deepcopy(first.model)
        weights: list[Tensor] = list(self._global.parameters())
        self._outer = self.make_outer(weights, len(begin)) if self.make_outer else None
        batches = self._batches(epochs)
        next(batches)
        step, share = 0, sorted(begin)
        for section in sections:
            while step < section.step:
                self._train(batches.send(share))
                step += 1
            self._lose([name for name in self.replicas if name not in section.took_part])
            if section.ends:
                average([list(each.model.parameters()) for each in self.replicas.values()])
            elif step and step % self.period == 0:
                self._average()
            for name in section.new:
                self.replicas[name] = copy.deepcopy(self.replicas[min(section.took_part)])
            self._lose(section.left, keeps_state=True)
            self.replicas = {name: self.replicas[name] for name in section.present}
            share = section.present
        return self.replicas

    def _batches(self, epochs: int) -> Generator[dict[str, list[int]], list[str], None]:
        """Yields by replica the samples of a step, each time among those that were sent."""
        share = yield {}
        for epoch in range(epochs):
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
            offset = 0
            while offset < self.size:
                left = order[offset:]
                left += order[: -len(left) % len(share)]
                batches = {name: left[n :: len(share)][: self.batch_size] for n, name in enumerate(share)}
                offset += self.batch_size * len(share)
                share = yield batches

    def _train(self, batches: dict[str, list[int]]) -> None:
        for name, samples in batches.items():
            replica = self.replicas[name]
            replica.optimizer.zero_grad()
            self.loss(replica.model, samples).backward()
            replica.optimizer.step()

    def _lose(self, lost: Sequence[str], keeps_state: bool = False) -> None:
        """With a lost replica its shard of the outer optimizer's state is lost, and is zero then, if it is not kept."""
        if lost and self._outer is not None:
            assert self.make_outer is not None
            weights: list[Tensor] = list(self._global.parameters())
            names = list(self.replicas)
            after = self.make_outer(weights, len(names) - len(lost))
            shards = [] if keeps_state else [(names.index(name), len(names)) for name in lost]
            self._outer = with_lost_shards(self._outer, after, weights, shards)
        for name in lost:
            del self.replicas[name]

    @torch.no_grad()
    def _average(self) -> None:
        replicas = list(self.replicas.values())
        weights = list(self._global.parameters())
        for one, *own in zip(weights, *(each.model.parameters() for each in replicas), strict=True):
            if self._outer is None:
                one.copy_(mean(own))
            else:  # DiLoCo, Algorithm 1, line 12
                one.grad = -mean([p - one for p in own])
        if self._outer is not None:
            self._outer.step()
        for each in replicas:
            for p, one in zip(each.model.parameters(), weights, strict=True):
                p.copy_(one)
        if self.average_states:
            average(
                [[each.optimizer.state[p]["momentum_buffer"] for p in each.model.parameters()] for each in replicas]
            )


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, added in the order of the replicas."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)


@torch.no_grad()
def average(of_replicas: Sequence[Sequence[Tensor]]) -> None:
    for tensors in zip(*of_replicas, strict=True):
        result = mean(tensors)
        for tensor in tensors:
            tensor.copy_(result)


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
