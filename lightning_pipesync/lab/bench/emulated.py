"""Networks with the tensors of real ones whose layers sleep instead of computing, and how long they have to.

Tables of networks in DeAR Table I, and of AlexNet, have the tensors and the work of their layers, in the order of
torchvision and transformers. Classifiers are of images of 3 x 224 x 224 in 1000 classes. BERT is in pre-training, on
sentences of 64 tokens (Section VI-A).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.profiling import profiled

_NUM_CLASSES = 1000
_VOCABULARY, _POSITIONS, _TOKENS = 30522, 512, 64


@dataclass(frozen=True)
class LayerSpec:
    """A learnable layer, as DeAR Table I counts them: a module that holds parameters itself.

    ``block`` is the part of the network that a user would wrap as one unit: a residual block, an encoder layer. Its
    layers follow each other. ``forward_flops`` is an estimate for the forward pass of one sample: twice the weights
    times the output positions (convolution) or tokens (linear layer); two for each output value of a norm and one for
    each of an embedding. What has no parameters (pooling, activations, the product of queries and keys) does not count.
    ``tensors`` are the shapes of its parameters by name, without dots.
    """

    name: str
    block: str
    tensors: Mapping[str, tuple[int, ...]]
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
        return sum(math.prod(shape) for layer in self.layers for shape in layer.tensors.values())

    @property
    def forward_flops(self) -> int:
        return sum(layer.forward_flops for layer in self.layers)

    def add(self, name: str, forward_flops: int, **shapes: tuple[int, ...]) -> None:
        """Adds a layer with a tensor for each of ``shapes``; ``name`` is its name in its block, may be empty."""
        full_name = ".".join(part for part in (self.block, name) if part)
        self.layers.append(LayerSpec(full_name, self.block, shapes, forward_flops))

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


def alexnet() -> ModelTable:
    """Returns AlexNet (8 layers, 16 tensors, 61.1 million values): few large tensors."""
    table = ModelTable("alexnet")
    convolutions = [(3, 64, 11, 55), (64, 192, 5, 27), (192, 384, 3, 13), (384, 256, 3, 13), (256, 256, 3, 13)]
    for index, (inputs, outputs, kernel, size) in enumerate(convolutions):
        table.block = f"features.{index}"
        table.conv("", inputs, outputs, (kernel, kernel), size, bias=True)
    for index, (inputs, outputs) in enumerate([(256 * 6 * 6, 4096), (4096, 4096), (4096, _NUM_CLASSES)]):
        table.block = f"classifier.{index}"
        table.linear("", inputs, outputs)
    return table


def resnet50() -> ModelTable:
    """Returns ResNet-50 (107 layers, 161 tensors, 25.6 million values).

    The stride of a bottleneck is in its 3 x 3 convolution. The count includes the classifier.
    """
    table = ModelTable("resnet50")

    def conv_norm(name: str, inputs: int, outputs: int, kernel: int, size: int, norm: str = "") -> None:
        table.conv(name, inputs, outputs, (kernel, kernel), size)
        table.norm(norm or name.replace("conv", "bn"), outputs, size**2)

    conv_norm("conv1", 3, 64, 7, 112)
    channels = 64
    for stage, (depth, width, size) in enumerate([(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)]):
        for index in range(depth):
            table.block = f"layer{stage + 1}.{index}"
            conv_norm("conv1", channels, width, 1, size * 2 if index == 0 and stage > 0 else size)
            conv_norm("conv2", width, width, 3, size)
            conv_norm("conv3", width, 4 * width, 1, size)
            if index == 0:
                conv_norm("downsample.0", channels, 4 * width, 1, size, norm="downsample.1")
            channels = 4 * width
    table.block = "fc"
    table.linear("", channels, _NUM_CLASSES)
    return table


def _bert(name: str, hidden: int, depth: int) -> ModelTable:
    """Returns BERT with both of its pre-training heads, as ``transformers.BertForPreTraining`` registers it.

    The paper's count is that of this network: the encoder and its pooler alone have 199 tensors (Base) or 391 (Large);
    the heads for masked words and for the next sentence add 7 tensors. The output matrix of the former is the word
    embedding, tied, and counted once; its work is that of the layer ``cls.predictions``, which holds its bias.
    """
    table = ModelTable(name)
    table.block = "bert.embeddings"
    for kind, entries in (("word", _VOCABULARY), ("position", _POSITIONS), ("token_type", 2)):
        table.embedding(f"{kind}_embeddings", entries, hidden, _TOKENS)
    table.norm("LayerNorm", hidden, _TOKENS)
    for index in range(depth):
        table.block = f"bert.encoder.layer.{index}"
        for projection in ("self.query", "self.key", "self.value", "output.dense"):
            table.linear(f"attention.{projection}", hidden, hidden, _TOKENS)
        table.norm("attention.output.LayerNorm", hidden, _TOKENS)
        table.linear("intermediate.dense", hidden, 4 * hidden, _TOKENS)
        table.linear("output.dense", 4 * hidden, hidden, _TOKENS)
        table.norm("output.LayerNorm", hidden, _TOKENS)
    table.block = "bert.pooler"
    table.linear("dense", hidden, hidden)
    table.block = "cls"
    table.add("predictions", 2 * _VOCABULARY * hidden * _TOKENS, bias=(_VOCABULARY,))
    table.linear("predictions.transform.dense", hidden, hidden, _TOKENS)
    table.norm("predictions.transform.LayerNorm", hidden, _TOKENS)
    table.linear("seq_relationship", hidden, 2)
    return table


#: BERT-Base (105 layers, 206 tensors, 110.1 million values) and BERT-Large (201 layers, 398 tensors, 336.2 million).
bert_base = partial(_bert, "bert-base", hidden=768, depth=12)
bert_large = partial(_bert, "bert-large", hidden=1024, depth=24)

#: By name the networks that can be emulated.
TABLES: dict[str, Callable[[], ModelTable]] = {
    "alexnet": alexnet,
    "resnet50": resnet50,
    "bert-base": bert_base,
    "bert-large": bert_large,
}


#: The shortest sleep; less is carried over, because a sleep takes 0.05 ms or more longer than requested.
_SHORTEST_SLEEP_S = 0.5e-3
#: Maximum time between two layers that counts as theirs: the interpreter needs 0.01 to 0.04 ms, or more if busy.
_LONGEST_DISPATCH_S = 0.05e-3
#: Maximum lateness that later layers make up for: a process that was stopped must not skip its work.
_LARGEST_CREDIT_S = 0.1


def computation_seconds(
    num_bytes: int, world_size: int, bandwidth_bytes_per_s: float, ratio: float
) -> tuple[float, float]:
    """Returns the seconds of forward and backward pass of which the all-reduce of all gradients takes ``ratio`` times.

    The all-reduce takes ``2 (P - 1) / P * num_bytes / bandwidth``: DeAR Eq. 5 without latency. Backward takes twice as
    long as forward, since it computes two products, by the inputs and by the weights, where forward computes one.
    """
    if world_size < 2:
        raise ValueError(f"world_size must be at least 2 for a ratio of communication, got {world_size!r}.")
    numbers = {"num_bytes": num_bytes, "bandwidth_bytes_per_s": bandwidth_bytes_per_s, "ratio": ratio}
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}.")
    seconds = 2 * (world_size - 1) / world_size * num_bytes / bandwidth_bytes_per_s / ratio
    return seconds / 3, 2 * seconds / 3


class EmulatedCompute:
    """The emulated computation of a model, which accounts for the time that its layers should and do take.

    Only time within a layer counts, and the first 0.05 ms between two layers, in which Python calls the next one: on an
    accelerator the host runs ahead and hides it. Longer waits of hooks, such as for communication, do not count. A
    layer that ends late, because a sleep was too long or the processor busy, makes later layers shorter.

    The seconds of the two passes of the whole model may be set between steps.
    """

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        for name, seconds in (("forward_seconds", forward_seconds), ("backward_seconds", backward_seconds)):
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"{name} must be a number of seconds, 0 or more, got {seconds!r}.")
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self._owed = 0.0
        self._ended = 0.0

    def spend(self, seconds: float, since: float) -> None:
        """Sleeps until ``seconds`` have passed since ``since`` (``time.perf_counter``), plus the time carried over."""
        dispatch = min(since - self._ended, _LONGEST_DISPATCH_S)
        self._owed += seconds - dispatch - (time.perf_counter() - since)
        if self._owed >= _SHORTEST_SLEEP_S:
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin
        self._owed = max(self._owed, -_LARGEST_CREDIT_S)
        self._ended = time.perf_counter()


class EmulatedModel(nn.Sequential):
    """A network with real parameter tensors and the timing of an accelerator.

    Its members are its blocks, for ``fully_shard``, each an ``nn.Sequential`` of layers. Each tensor has ``scale``
    times its true number of values, at least 1; in its true shape if ``scale`` is 1, else 1-D. Input and output are one
    value, a 0-dim tensor. Every value of every gradient is the gradient of the loss by the output: with the loss
    ``output ** 2 / 2`` it is the input.

    A layer sleeps for its share of the forward and of the backward pass, by its floating-point operations, which leaves
    the processor to communication. Gradients become ready as in a real backward pass: the last layer first, those of
    one layer when its backward ends. The network is a chain, in the order of the table.

    A layer writes its gradients once in each backward pass, within its time, into tensors that it keeps. If
    ``param.grad`` was None it shares their memory, without a copy except into DDP's buckets, and **the next backward
    pass overwrites a gradient that is kept by reference**. Otherwise autograd adds to it in place. Forward touches no
    memory.

    Not emulated: activations, kernels that compete with communication for the device, a graph that is not a chain, the
    host's time to launch a layer.
    """

    def __init__(
        self, table: ModelTable, scale: float = 1.0, *, forward_seconds: float, backward_seconds: float
    ) -> None:
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, got {scale!r}.")
        compute = EmulatedCompute(forward_seconds, backward_seconds)
        super().__init__(
            *(
                nn.Sequential(
                    *(EmulatedLayer(spec, scale, spec.forward_flops / table.forward_flops, compute) for spec in block)
                )
                for _, block in groupby(table.layers, key=lambda spec: spec.block)
            )
        )
        self.compute = compute


class EmulatedLayer(nn.Module):
    """A layer with tensors of ``scale``, which takes a ``share``, from 0 to 1, of its :class:`EmulatedModel`'s time."""

    def __init__(self, spec: LayerSpec, scale: float, share: float, compute: EmulatedCompute) -> None:
        super().__init__()
        self.share = share
        self.compute = compute
        for name, true_shape in spec.tensors.items():
            shape = true_shape if scale == 1 else (max(1, round(scale * math.prod(true_shape))),)
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        self._gradients: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Takes the time of the layer's forward pass; returns a copy of ``x``."""
        begin = time.perf_counter()
        with profiled("forward of a layer"):
            # `_parameters`, where a wrapper (FSDP2, `functional_call`) puts the tensors to compute with.
            x = _Compute.apply(x, self, *self._parameters.values())
            self.compute.spend(self.share * self.compute.forward_seconds, begin)
        return x

    def gradients(self, parameters: Iterable[Tensor], value: Tensor) -> list[Tensor]:
        """Returns a gradient for each parameter, ``value`` (0-dim) everywhere.

        Autograd uses a tensor as ``param.grad`` without a copy if there is no other reference to it: hence ``detach``,
        a new tensor on the kept memory. An existing gradient may share that memory, which must not be overwritten then.
        """
        parameters = list(parameters)
        if not self._gradients:
            self._gradients = [torch.empty_like(parameter) for parameter in parameters]
        return [
            gradient.fill_(value).detach() if parameter.grad is None else value.expand_as(parameter)
            for parameter, gradient in zip(parameters, self._gradients, strict=True)
        ]


class _Compute(torch.autograd.Function):
    """The identity; its backward takes the layer's time, then returns the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EmulatedLayer, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        # As in a real layer, a parameter that is written to between forward and backward is an error.
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        begin = time.perf_counter()
        (value,) = grad_outputs
        layer: EmulatedLayer = ctx.layer
        gradients = layer.gradients(ctx.saved_tensors, value)
        layer.compute.spend(layer.share * layer.compute.backward_seconds, begin)
        return value, None, *gradients
