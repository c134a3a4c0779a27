"""Tables of networks in DeAR Table I, and of AlexNet: their tensors and the work of their layers, for emulation.

Layers are in the order of torchvision and transformers. Classifiers are of images of 3 x 224 x 224 in 1000 classes.
BERT is in pre-training, on sentences of 64 tokens (Section VI-A).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

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
