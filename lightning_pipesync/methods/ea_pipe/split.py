"""The split of an ``nn.Sequential`` among stages by the cost of its layers, and the input of a stage."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.core.torch_private import has_hooks, map_tensors, tensors_in
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig

#: The slowest stage may take this many times as long as with the best split, if that saves memory.
TOLERANCE = 1.05
#: The number of measurements of a layer, of which the fastest counts.
REPEATS = 3


class ModelSplit(ABC):
    """The layers of a model, and where stages begin."""

    layers: list[tuple[str, nn.Module]]  # by name; of a traced model none before :meth:`choose`

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.cuts: list[int] = []  # the indices of the first layers of all stages but the first

    @abstractmethod
    def inspect(self, source: Callable[[], Any]) -> Any:
        """Called on the first stage with the source of the model's first input; all stages get the result."""

    @abstractmethod
    def choose(self, inspected: Any) -> list[int]:
        """Returns the cuts for the result of :meth:`inspect`."""

    def cut(self, cuts: Sequence[int]) -> None:
        """Sets :attr:`cuts`; raises a ValueError if a stage would have no layers, or two would share a parameter."""
        if len(cuts) != self._num_stages - 1 or any(cut >= len(self.layers) for cut in cuts):
            raise ValueError(
                f"split={tuple(cuts)!r} must name the first layers of the second to the last of {self._num_stages} "
                f"stages: {self._num_stages - 1} indices below {len(self.layers)}."
            )
        owners: dict[int, tuple[int, str]] = {}
        for i, (name, layer) in enumerate(self.layers):
            stage = sum(cut <= i for cut in cuts)
            for tensor in [*layer.parameters(), *layer.buffers()]:
                owner, other = owners.setdefault(id(tensor), (stage, name))
                if owner != stage:
                    raise ValueError(
                        f"Layers {other} and {name} share a parameter or buffer, and are on stages {owner} and "
                        f"{stage}: set split= so that they are on one stage, or give each its own parameters."
                    )
        self.cuts = list(cuts)

    def named_layers_of(self, stage: int) -> list[tuple[str, nn.Module]]:
        start, end = [0, *self.cuts, len(self.layers)][stage : stage + 2]
        return self.layers[start:end]

    def layers_of(self, stage: int) -> list[nn.Module]:
        return [layer for _, layer in self.named_layers_of(stage)]

    def tensors_of(self, stage: int) -> list[Tensor]:
        """Returns the parameters of a stage and then its buffers, each once."""
        layers = nn.ModuleList(self.layers_of(stage))
        return [*layers.parameters(), *layers.buffers()]


class SequentialSplit(ModelSplit):
    """The split of the layers of an ``nn.Sequential``."""

    def __init__(self, model: nn.Sequential, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        super().__init__(num_stages)
        self.layers = flattened(model)
        self._modules = [layer for _, layer in self.layers]
        self._split, self._device = config.split, device
        if len(self.layers) < num_stages:
            raise ValueError(
                f"{num_stages} stages need at least as many layers, and the Sequential has {len(self.layers)}: use "
                "fewer processes, or divide its layers into smaller ones."
            )

    def inspect(self, source: Callable[[], Any]) -> list[int] | None:
        if self._split != "balanced":
            return None
        return balanced(*measure(self._modules, source(), self._device), self._num_stages)

    def choose(self, inspected: list[int] | None) -> list[int]:
        if inspected is not None:
            return inspected
        if self._split == "parameters":
            return partition(numbers_of_parameters(self._modules), self._num_stages)
        return [int(index) for index in self._split]


class LayerInput:
    """The input of layers that another process, or another pass, feeds: it collects the gradients to send back.

    Attributes:
        tree: the activations, which are not leaves of the graph, so that the first layer may work in place.
        gradients: the gradients of those that require one, in order; None if the layers do not use it.
    """

    def __init__(self, tree: Any) -> None:
        self.gradients: list[Tensor | None] = []
        self.tree = map_tensors(self._watched, tree)

    def _watched(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        anchor = torch.empty((), device=tensor.device, requires_grad=True)
        inner: Tensor = _Inner.apply(anchor, tensor.detach())
        gradients, position = self.gradients, len(self.gradients)
        gradients.append(None)

        def keep(gradient: Tensor) -> None:  # no reference to self, which would be a cycle through the graph
            gradients[position] = gradient

        inner.register_hook(keep)
        return inner


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def flattened(layers: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Returns the layers by name, including those of nested plain ``nn.Sequential``."""
    found = []
    for name, layer in layers.named_children():
        if type(layer) is nn.Sequential and len(layer) and not has_hooks(layer):
            found += flattened(layer, f"{prefix}{name}.")
        else:
            found.append((prefix + name, layer))
    return found


def numbers_of_parameters(layers: Sequence[nn.Module]) -> list[float]:
    """Returns the number of values in the parameters of each layer."""
    return [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in layers]


def partition(costs: Sequence[float], parts: int, limits: Sequence[tuple[Sequence[float], float]] = ()) -> list[int]:
    """Splits a sequence into parts, none empty, whose largest sum of ``costs`` is as small as possible.

    ``limits``: pairs of other costs and the largest sum of a part.

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


def _run(layer: nn.Module, value: Any, device: torch.device) -> tuple[float, Any]:
    inputs = LayerInput(value)
    before = _now(device)
    with torch.enable_grad():
        output = layer(inputs.tree)
        differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])
    seconds = _now(device) - before
    layer.zero_grad()
    return seconds, _copied(output)


def _copied(tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), tree)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
