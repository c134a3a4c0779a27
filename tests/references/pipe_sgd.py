"""Algorithm 1 of the Pipe-SGD poster in one process, with plain tensors: a delayed loop.

All workers hold the same weights, so one model serves for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

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


def predicted(
    model: nn.Module,
    optimizer: Optimizer,
    in_flight: Sequence[tuple[list[Tensor], float]],
    clip: Callable[[nn.Module], object],
) -> nn.Module:
    """A copy of the model, after an update by each of some gradients, with the learning rate of its step."""
    trial, trial_optimizer = copy.deepcopy((model, optimizer))
    for gradients, rate in in_flight:
        for p, gradient in zip(trial.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        clip(trial)
        trial_optimizer.param_groups[0]["lr"] = rate
        trial_optimizer.param_groups[0]["fused"] = True  # as trial steps on a CPU are
        trial_optimizer.step()
    return trial


def simulate(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    world_size: int,
    columns: int = 1,
    num_steps: int,
    staleness: int,
    compression: str = "none",
    error_feedback: bool = True,
    warmup_steps: int = 0,
    accumulate: int = 1,
    schedule: Callable[[int], float] | None = None,
    clip: Callable[[nn.Module], object] = lambda model: None,
    learning_rate: Callable[[float, int, float], float] = lambda rate, late, distance: rate,
    drain: bool = False,
    delay_compensation: str = "none",
) -> list[Tensor]:
    """Returns the weights after each step, and, if asked, after the pipeline is drained.

    Args:
        columns: neighboring ranks that are a host.
        schedule: learning rate of each step; the optimizer's own if None.
        learning_rate: of an update, from that of the gradient's step, by how many updates it is late, and the squared
            distance that the weights have moved since.
        delay_compensation: a rank computes its gradients at the weights predicted with its own gradients in flight
            ("prediction"), with zeros ("momentum"), or at the true weights ("none").
    """
    parameters = list(model.parameters())[::-1]  # as gradients become ready
    codec = get_codec(compression)
    empty = fused([torch.zeros_like(p) for p in parameters])
    shards = [shard_of(empty.clone(), rank, world_size) for rank in range(world_size)]
    dropped = [[empty.clone() for _ in range(world_size // columns)], shards] if error_feedback else None
    in_flight: list[tuple[Tensor, float, int, Tensor]] = []
    own: list[list[list[Tensor]]] = [[] for _ in range(world_size)]  # of each gradient in flight this rank's part
    updates = 0
    weights = []

    def flat() -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in parameters])

    def apply_oldest() -> None:
        nonlocal updates
        gradient, rate, updates_then, weights_then = in_flight.pop(0)  # lines 3 and 4
        for of_rank in own:
            of_rank.pop(0)
        for p, values in zip(parameters, divided(gradient, parameters), strict=True):
            p.grad = values.clone()
        clip(model)
        distance = float((flat() - weights_then).square().sum())
        optimizer.param_groups[0]["lr"] = learning_rate(rate, updates - updates_then, distance)
        optimizer.step()  # line 5
        updates += 1

    for t in range(num_steps):
        rate = optimizer.defaults["lr"] if schedule is None else schedule(t)
        local = []
        for rank in range(world_size):
            replica = model
            if delay_compensation != "none":
                rates = [rate_then for _, rate_then, *_ in in_flight]
                replica = predicted(model, optimizer, list(zip(own[rank], rates, strict=True)), clip)
            replica.zero_grad()
            for micro in range(accumulate):
                loss(replica, t * accumulate + micro, rank).backward()  # lines 6 to 8
            gradients = [p.grad for p in replica.parameters()]
            local.append(fused(gradients[::-1]))
            own[rank].append(
                [torch.zeros_like(g) if delay_compensation == "momentum" else g.clone() for g in gradients]
            )
        in_flight.append((all_reduce(local, codec, dropped, columns), rate, updates, flat()))  # lines 9 and 10
        if len(in_flight) > (0 if t < warmup_steps else staleness):
            apply_oldest()
        weights.append(flat())
    if drain:
        while in_flight:
            apply_oldest()
        weights.append(flat())
    return weights
