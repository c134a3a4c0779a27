"""The tensors of a network and the work of its layers: all that an emulation has to know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class TensorSpec(NamedTuple):
    """One parameter tensor: its name in its layer, without dots, and its sizes."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayerSpec:
    """A learnable layer, as DeAR Table I counts them: a module that holds parameters itself.

    ``block`` is the part of the network that a user would wrap as one unit: a residual block, an encoder layer. Its
    layers follow each other. ``forward_flops`` is an estimate for the forward pass of one sample: twice the weights
    times the output positions (convolution) or tokens (linear layer); two for each output value of a norm and one for
    each of an embedding. What has no parameters (pooling, activations, the product of queries and keys) does not count.
    """

    name: str
    block: str
    tensors: tuple[TensorSpec, ...]
    forward_flops: int


class ModelTable:
    """All layers of a network, in the order of registration, which is nearly that of execution.

    The next layers belong to ``block``: their names begin with it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.block = name, ""
        self.layers: list[LayerSpec] = []

    @property
    def num_tensors(self) -> int:
        """DeAR Table I, "# Tensors"."""
        return sum(len(layer.tensors) for layer in self.layers)

    @property
    def numel(self) -> int:
        """The number of values in all tensors (DeAR Table I, "# Param.")."""
        return sum(tensor.numel for layer in self.layers for tensor in layer.tensors)

    @property
    def forward_flops(self) -> int:
        return sum(layer.forward_flops for layer in self.layers)

    def add(self, name: str, forward_flops: int, **shapes: tuple[int, ...]) -> None:
        """Adds a layer with a tensor for each of ``shapes``; ``name`` is its name in its block, may be empty."""
        full_name = ".".join(part for part in (self.block, name) if part)
        tensors = tuple(TensorSpec(*tensor) for tensor in shapes.items())
        self.layers.append(LayerSpec(full_name, self.block, tensors, forward_flops))

    def conv(
        self, name: str, inputs: int, outputs: int, kernel: tuple[int, int], size: int, *, bias: bool = False
    ) -> None:
        """Adds a convolution from ``inputs`` to ``outputs`` channels; its output is ``size x size``."""
        weight = (outputs, inputs, *kernel)
        self.add(name, 2 * math.prod(weight) * size**2, weight=weight, **({"bias": (outputs,)} if bias else {}))

    def norm(self, name: str, channels: int, positions: int) -> None:
        """Adds a batch or layer norm of ``channels`` values at each of ``positions`` pixels or tokens."""
        self.add(name, 2 * channels * positions, weight=(channels,), bias=(channels,))

    def linear(self, name: str, inputs: int, outputs: int, positions: int = 1) -> None:
        """Adds a linear layer with bias, applied to ``positions`` tokens."""
        self.add(name, 2 * outputs * inputs * positions, weight=(outputs, inputs), bias=(outputs,))

    def embedding(self, name: str, entries: int, hidden: int, tokens: int) -> None:
        """Adds a table of ``entries`` vectors of ``hidden`` values, of which ``tokens`` are looked up."""
        self.add(name, hidden * tokens, weight=(entries, hidden))
