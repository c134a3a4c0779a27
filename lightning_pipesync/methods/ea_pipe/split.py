"""The split of layers among stages, by their cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_pipesync.core.comm.channel import LocalChannel
from lightning_pipesync.core.torch_private import tensors_in
from lightning_pipesync.methods.ea_pipe.stage_input import StageInput
from lightning_pipesync.methods.ea_pipe.torch_private import has_hooks
from lightning_pipesync.methods.method import device_of

#: The slowest stage may take this many times as long as with the best split, if that saves memory.
TOLERANCE = 1.05
#: The number of measurements of a layer, of which the fastest counts.
REPEATS = 3


def flattened(layers: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Returns the layers by name, including those of nested plain ``nn.Sequential``."""
    found = []
    for name, layer in layers.named_children():
        if type(layer) is nn.Sequential and len(layer) and not has_hooks(layer):
            found += flattened(layer, f"{prefix}{name}.")
        else:
            found.append((prefix + name, layer))
    return found


def partition(costs: Sequence[float], parts: int, limits: Sequence[tuple[Sequence[float], float]] = ()) -> list[int]:
    """Splits a sequence into parts, none empty, whose largest sum is as small as possible.

    Args:
        costs: the cost of each member.
        parts: the number of parts.
        limits: pairs of other costs and the largest sum of a part.

    Returns:
        The indices of the first members of all parts but the first.
    """
    sums = [_running(costs), *(_running(others) for others, _ in limits)]
    most = [limit for _, limit in limits]

    def largest(start: int, end: int) -> float:
        within = all(s[end] - s[start] <= m for s, m in zip(sums[1:], most, strict=True))
        return sums[0][end] - sums[0][start] if within else float("inf")

    count = len(costs)
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    start_of = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = float("-inf")
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            start = min(range(part - 1, end), key=lambda s: max(best[part - 1][s], largest(s, end)))
            best[part][end], start_of[part][end] = max(best[part - 1][start], largest(start, end)), start
    cuts, end = [], count
    for part in range(parts, 0, -1):
        end = start_of[part][end]
        cuts.append(end)
    return cuts[-2::-1]


def balanced(times: Sequence[float], num_bytes: Sequence[float], parts: int) -> list[int]:
    """Splits so that the largest stage is smallest, with the slowest within :data:`TOLERANCE` of the best split's."""
    fastest = _largest(times, partition(times, parts))
    return partition(num_bytes, parts, [(times, fastest * TOLERANCE)])


def measure(layers: Sequence[nn.Module], value: Any, device: torch.device) -> tuple[list[float], list[float]]:
    """Returns the seconds of a forward and backward pass, and the bytes of parameters and output, by layer.

    The layers are moved to ``device`` one after the other. Buffers and random number generators are restored.
    """
    times, sizes = [], []
    value = _copied(value)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for layer in layers:
            home = device_of(layer)
            layer.to(device)
            buffers = [buffer.clone() for buffer in layer.buffers()]
            runs = [_run(layer, value, device) for _ in range(REPEATS)]
            for buffer, before in zip(layer.buffers(), buffers, strict=True):
                buffer.copy_(before)
            layer.to(home)
            times.append(min(seconds for seconds, _ in runs))
            value = runs[0][1]
            sizes.append(float(sum(t.nbytes for t in [*layer.parameters(), *tensors_in(value)])))
    return times, sizes


def numbers_of_parameters(layers: Sequence[nn.Module]) -> list[float]:
    """Returns the number of values in the parameters of each layer."""
    return [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in layers]


def check_number(layers: Sequence[tuple[str, nn.Module]], num_stages: int) -> None:
    """Checks that there are enough layers for all stages.

    Raises:
        ValueError: there are too few.
    """
    if len(layers) < num_stages:
        raise ValueError(
            f"{num_stages} stages need at least as many layers, and the Sequential has {len(layers)}: use fewer "
            "processes, or divide its layers into smaller ones."
        )


def checked_cuts(cuts: Sequence[int], layers: Sequence[tuple[str, nn.Module]], num_stages: int) -> list[int]:
    """Returns ``cuts`` after checking them.

    Raises:
        ValueError: they do not split the layers into ``num_stages`` stages, or two stages would share a parameter.
    """
    if len(cuts) != num_stages - 1 or any(cut >= len(layers) for cut in cuts):
        raise ValueError(
            f"split={tuple(cuts)!r} must name the first layers of the second to the last of {num_stages} stages: "
            f"{num_stages - 1} indices below {len(layers)}."
        )
    owners: dict[int, tuple[int, str]] = {}
    for i, (name, layer) in enumerate(layers):
        stage = sum(cut <= i for cut in cuts)
        for tensor in [*layer.parameters(), *layer.buffers()]:
            owner, other = owners.setdefault(id(tensor), (stage, name))
            if owner != stage:
                raise ValueError(
                    f"Layers {other} and {name} share a parameter or buffer, and are on stages {owner} and {stage}: "
                    "set split= so that they are on one stage, or give them parameters of their own."
                )
    return list(cuts)


def _run(layer: nn.Module, value: Any, device: torch.device) -> tuple[float, Any]:
    stage_input = StageInput(value)
    before = _now(device)
    with torch.enable_grad():
        output = layer(stage_input.tree)
        differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])
    seconds = _now(device) - before
    layer.zero_grad()
    return seconds, _copied(output)


def _copied(tree: Any) -> Any:
    channel = LocalChannel()
    channel.send(tree)
    return channel.receive()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _running(costs: Sequence[float]) -> list[float]:
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    return sums


def _largest(costs: Sequence[float], cuts: Sequence[int]) -> float:
    bounds = [0, *cuts, len(costs)]
    return max(sum(costs[start:end]) for start, end in pairwise(bounds))
