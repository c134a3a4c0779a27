"""The split of a model among stages: of an ``nn.Sequential`` by the cost of its layers, of other models by tracing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from lightning_pipesync.core.comm.channel import LocalChannel
from lightning_pipesync.core.torch_private import tensors_in
from lightning_pipesync.methods.ea_pipe.channels import StageInput
from lightning_pipesync.methods.ea_pipe.config import SYNCHRONOUS, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.layout import Layout, input_of
from lightning_pipesync.methods.ea_pipe.torch_private import has_hooks
from lightning_pipesync.methods.ea_pipe.traced import Tracer
from lightning_pipesync.methods.method import device_of

#: The slowest stage may take this many times as long as with the best split, if that saves memory.
TOLERANCE = 1.05
#: The number of measurements of a layer, of which the fastest counts.
REPEATS = 3


class SequentialSplit:
    """The split of the layers of an ``nn.Sequential``.

    Attributes:
        layers: the layers by name, in order.
    """

    def __init__(self, model: nn.Sequential, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        self.layers = flattened(model)
        self._modules = [layer for _, layer in self.layers]
        self._split, self._num_stages, self._device = config.split, num_stages, device
        check_number(self.layers, num_stages)

    def inspect(self, source: Callable[[], Any]) -> list[int] | None:
        """Returns what the first stage tells the others about the model's first input: the cuts, if measured."""
        if self._split != "balanced":
            return None
        return balanced(*measure(self._modules, source(), self._device), self._num_stages)

    def cuts(self, inspected: list[int] | None) -> list[int]:
        """Returns the indices of the first layers of all stages but the first."""
        if inspected is not None:
            return inspected
        if self._split == "parameters":
            return partition(numbers_of_parameters(self._modules), self._num_stages)
        return [int(index) for index in self._split]


class TracedSplit:
    """The split of any other model, with one layer per stage, made by tracing.

    Attributes:
        layers: the layers by name, in order; none before :meth:`cuts`.
    """

    def __init__(self, model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        name, names = type(model).__name__, config.split_names or ()
        if config.algorithm in SYNCHRONOUS:
            raise ValueError(
                f"algorithm={config.algorithm!r} takes the layers of an nn.Sequential, and {name} would have to be "
                "traced: make it one, without names in split=, or choose another algorithm."
            )
        if not names and num_stages > 1:
            raise ValueError(
                f"{name} is no nn.Sequential, and split={config.split!r} does not say where to divide it: set split= "
                "to the names of the submodules with which the later stages begin."
            )
        if len(names) != num_stages - 1:
            raise ValueError(
                f"split={names!r} must have as many names as there are stages after the first, {num_stages - 1} of "
                "them: of the submodules with which they begin."
            )
        self.layers: list[tuple[str, nn.Module]] = []
        self._tracer = Tracer(model, names, device, config.seed)

    def inspect(self, source: Callable[[], Any]) -> Layout:
        """Returns what the first stage tells the others about the model's first input: its layout."""
        return input_of(source())[0]

    def cuts(self, inspected: Layout) -> list[int]:
        """Traces the layers, and returns the indices of those of all stages but the first."""
        self.layers = self._tracer.stages(inspected)
        return list(range(1, len(self.layers)))


def split_of(
    model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device
) -> SequentialSplit | TracedSplit:
    """Returns the split that the settings choose.

    Raises:
        ValueError: the model cannot be split with these settings.
    """
    if isinstance(model, nn.Sequential) and config.split_names is None:
        return SequentialSplit(model, config, num_stages, device)
    return TracedSplit(model, config, num_stages, device)


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
    sums, *limited = ([0.0, *accumulate(values)] for values in (costs, *(others for others, _ in limits)))

    def cost(start: int, end: int) -> float:
        within = all(s[end] - s[start] <= most for s, (_, most) in zip(limited, limits, strict=True))
        return sums[end] - sums[start] if within else float("inf")

    count = len(costs)
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    start_of = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = float("-inf")
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            start = min(range(part - 1, end), key=lambda s: max(best[part - 1][s], cost(s, end)))
            best[part][end], start_of[part][end] = max(best[part - 1][start], cost(start, end)), start
    cuts = [count]
    for part in range(parts, 0, -1):
        cuts.append(start_of[part][cuts[-1]])
    return cuts[-2:0:-1]


def balanced(times: Sequence[float], num_bytes: Sequence[float], parts: int) -> list[int]:
    """Splits so that the largest stage is smallest, with the slowest within :data:`TOLERANCE` of the best split's."""
    bounds = [0, *partition(times, parts), len(times)]
    fastest = max(sum(times[start:end]) for start, end in pairwise(bounds))
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
    """Raises a ValueError if there are fewer layers than stages."""
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
                    "set split= so that they are on one stage, or give each its own parameters."
                )
    return list(cuts)


def _run(layer: nn.Module, value: Any, device: torch.device) -> tuple[float, Any]:
    """Returns the seconds of both passes of a layer, and its output."""
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
