"""Algorithm 1 of the Pipe-SGD poster in one process, with plain tensors: a delayed loop.

All workers hold the same weights, so one model serves for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import shard_of
from lightning_pipesync.core.codecs import Codec, get_codec


def through(codec: Codec, values: Tensor, dropped: Tensor | None) -> Tensor:
    """What a receiver decodes; with error feedback, ``dropped`` is added first and keeps what is dropped now."""
    source = values.clone() if dropped is None else values + dropped
    wire = torch.empty(codec.wire_bytes(source.numel(), source.dtype), dtype=torch.uint8)
    codec.encode(source, wire)
    decoded = torch.empty_like(source)
    codec.decode(wire, decoded, source.dtype)
    if dropped is not None:
        dropped.copy_(source - decoded)
    return decoded


def all_reduce(
    gradients: Sequence[Tensor], codec: Codec, dropped: list[list[Tensor]] | None, columns: int = 1
) -> Tensor:
    """The mean of a flat gradient by rank, compressed once by each host; arguments as of :func:`two_halves`.

    If the codec's wires are gathered, all decode what each host has compressed; otherwise each shard of the mean is
    compressed once more, by its owner.
    """
    if not codec.gathered:
        return two_halves(gradients, codec, dropped, columns)
    hosts = means_of_hosts(gradients, columns)
    kept: Sequence[Tensor | None] = [None] * len(hosts) if dropped is None else dropped[0]
    decoded = []
    for column in range(columns):  # a rank of each host, which has summed this part of the gradient
        parts = [[None if flat is None else shard_of(flat, column, columns) for flat in one] for one in (hosts, kept)]
        decoded.append(mean([through(codec, *part) for part in zip(*parts, strict=True)]))
    return torch.cat(decoded)


def two_halves(
    gradients: Sequence[Tensor], codec: Codec, dropped: list[list[Tensor]] | None, columns: int = 1
) -> Tensor:
    """The mean of a flat gradient by rank: compressed once by each host, and each shard of the mean once by its owner.

    ``dropped``: what each host's codec dropped of its gradient, then what each owner's dropped of its shard, in the
    order of the shards. ``columns``: neighboring ranks that are a host, whose gradient is their mean.
    """
    shards = reduce_scatter(gradients, codec, None if dropped is None else dropped[0], columns)
    return torch.cat(
        [through(codec, shard, None if dropped is None else dropped[1][i]) for i, shard in enumerate(shards)]
    )


def means_of_hosts(gradients: Sequence[Tensor], columns: int) -> list[Tensor]:
    return [mean(gradients[first : first + columns]) for first in range(0, len(gradients), columns)]


def reduce_scatter(
    gradients: Sequence[Tensor], codec: Codec, dropped: list[Tensor] | None, columns: int = 1
) -> list[Tensor]:
    """The shards of :func:`two_halves` before their owners compress them."""
    hosts = means_of_hosts(gradients, columns)
    shards = []
    for column in range(columns):  # a rank of each host, which has summed this part of the gradient
        for owner in range(len(hosts)):
            pieces = []
            for host, gradient in enumerate(hosts):
                gradient, *residual = (
                    shard_of(shard_of(flat, column, columns), owner, len(hosts))
                    for flat in ([gradient] if dropped is None else [gradient, dropped[host]])
                )
                pieces.append(through(codec, gradient, residual[0] if residual else None))
            shards.append(mean(pieces))
    return shards


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in the order of the ranks, divided by their number."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)


def fused(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor, in which each of some fp32 tensors begins at a multiple of 64 bytes."""
    return torch.cat([nn.functional.pad(tensor.detach().reshape(-1), (0, -tensor.numel() % 16)) for tensor in tensors])


def divided(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor that :func:`fused` has made of tensors of these shapes."""
    parts = flat.split([fused([tensor]).numel() for tensor in tensors])
    return [part[: tensor.numel()].view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def assign(model: nn.Module, names: Sequence[str], flat: Tensor) -> None:
    """Sets the parameters of these names to the parts of a flat tensor."""
    parameters = [model.get_parameter(name) for name in names]
    for parameter, values in zip(parameters, divided(flat, parameters), strict=True):
        parameter.data.copy_(values)


Gradient = list[Tensor | None]
pairs = partial(zip, strict=True)


class InFlight(NamedTuple):
    """A mean gradient on its way, and what there was at its step."""

    gradient: Gradient
    own: list[Gradient]  # of each worker, from which the mean is
    rates: list[float]  # the learning rate of each group
    num_updates: int
    weights: Tensor


class Delayed:
    """One optimizer of Algorithm 1: a mean gradient updates the weights some steps later.

    Args:
        average: of the flat gradients of all workers.
        staleness: k.
        warmup_steps: in which it is 0.
        delay_compensation: a worker computes its gradients at the weights predicted with its own gradients in flight
            ("prediction"), with zeros ("momentum"), or at the true weights; the learning rate is divided by how many
            updates a gradient is late ("staleness"), or at most ``distance_constant`` over the squared distance that
            the weights have moved since ("distance").
        clip: clips the gradients of some parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        average: Callable[[Sequence[Tensor]], Tensor] = mean,
        *,
        staleness: int = 1,
        warmup_steps: int = 0,
        delay_compensation: str = "prediction",
        distance_constant: float = 0.0,
        clip: Callable[[list[Tensor]], object] = lambda parameters: None,
    ) -> None:
        self.optimizer, self.average, self.clip = optimizer, average, clip
        self.staleness, self.warmup_steps = staleness, warmup_steps
        self.compensation, self.constant = delay_compensation, distance_constant
        self.in_flight: list[InFlight] = []
        self.num_steps = self.num_updates = 0

    @property
    def parameters(self) -> list[Any]:
        return parameters_of(self.optimizer)

    @contextmanager
    def predicted(self, rank: int) -> Iterator[None]:
        """Within it the parameters are those after an update by each of a worker's gradients in flight."""
        true = [p.detach().clone() for p in self.parameters]
        trial = copy.deepcopy(self.optimizer)
        if self.compensation in ("prediction", "momentum"):
            for one in self.in_flight:
                zero = 0.0 if self.compensation == "momentum" else 1.0
                gradients = [None if g is None else g * zero for g in one.own[rank]]
                update(trial, gradients, one.rates, self.clip)
        set_parameters(self.parameters, parameters_of(trial))
        yield
        set_parameters(self.parameters, true)

    def step(self, own: list[Gradient]) -> None:
        """Lines 9 and 10 with the gradients of all workers; and lines 3 to 5. None: as a gradient in DDP."""
        backwards = self.parameters[::-1]  # as gradients become ready
        flat = [fused([torch.zeros_like(p) if g is None else g for p, g in pairs(backwards, one[::-1])]) for one in own]
        average = divided(self.average(flat), backwards)[::-1]
        gradient = [one if any(g is not None for g in each) else None for one, *each in pairs(average, *own)]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.in_flight.append(InFlight(gradient, own, rates, self.num_updates, flat_of(self.parameters)))
        if len(self.in_flight) > (0 if self.num_steps < self.warmup_steps else self.staleness):
            self.apply_oldest()
        self.num_steps += 1

    def apply_oldest(self) -> None:
        oldest = self.in_flight.pop(0)
        late = max(1, self.num_updates - oldest.num_updates)
        distance = float((flat_of(self.parameters) - oldest.weights).square().sum()) if self.constant else 0.0
        rates = oldest.rates
        if self.compensation == "staleness":
            rates = [rate / late for rate in rates]
        if self.compensation == "distance" and distance:
            rates = [min(rate, self.constant / distance) for rate in rates]
        update(self.optimizer, oldest.gradient, rates, self.clip)
        self.num_updates += 1


def parameters_of(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def flat(model: nn.Module) -> Tensor:
    """All parameters of a model in one vector."""
    return flat_of(list(model.parameters()))


def flat_of(parameters: Sequence[Tensor]) -> Tensor:
    """One vector of parameters, as their gradients become ready."""
    return torch.cat([p.detach().reshape(-1) for p in list(parameters)[::-1]])


@torch.no_grad()
def set_parameters(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)


def update(
    optimizer: Optimizer,
    gradient: Gradient,
    rates: Sequence[float],
    clip: Callable[[list[Tensor]], object],
) -> None:
    """Updates the weights by a gradient, with the learning rate of its step in each group."""
    parameters, now = parameters_of(optimizer), [group["lr"] for group in optimizer.param_groups]
    for p, values in zip_longest(parameters, gradient):  # those that were added since have none
        p.grad = None if values is None else values.clone()
    clip(parameters)
    for group, rate in zip_longest(optimizer.param_groups, rates):
        group["lr"] = group["lr"] if rate is None else rate
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, now, strict=True):
        group["lr"] = rate


def simulate(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    world_size: int,
    columns: int = 1,
    num_steps: int,
    compression: str = "none",
    error_feedback: bool = True,
    accumulate: int = 1,
    before_step: Callable[[int], object] = lambda step: None,
    drain: bool = False,
    **settings: Any,
) -> list[Tensor]:
    """Returns the weights after each step, and, if asked, after the pipeline is drained.

    Args:
        columns: neighboring ranks that are a host.
        before_step: sets the learning rate, for example.
        settings: those of :class:`Delayed`.
    """
    codec = get_codec(compression)
    empty = fused([torch.zeros_like(p) for p in parameters_of(optimizer)[::-1]])
    shards = [shard_of(empty.clone(), rank, world_size) for rank in range(world_size)]
    dropped = [[empty.clone() for _ in range(world_size // columns)], shards] if error_feedback else None
    loop = Delayed(optimizer, partial(all_reduce, codec=codec, dropped=dropped, columns=columns), **settings)
    weights = []
    for t in range(num_steps):
        before_step(t)
        own: list[Gradient] = []
        for rank in range(world_size):
            with loop.predicted(rank):
                model.zero_grad()
                for micro in range(accumulate):
                    loss(model, t * accumulate + micro, rank).backward()  # lines 6 to 8
                own.append([p.grad for p in loop.parameters])
        loop.step(own)
        weights.append(flat(model))
    while drain and loop.in_flight:
        loop.apply_oldest()
        if not loop.in_flight:
            weights.append(flat(model))
    return weights
