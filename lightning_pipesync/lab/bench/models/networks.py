"""Tables of the networks in DeAR Table I, and of AlexNet, in the order of torchvision, timm and transformers.

Classifiers of images of 3 x 224 x 224 in 1000 classes; BERT in pre-training, on sentences of 64 tokens (Section VI-A).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_pipesync.lab.bench.models.table import ModelTable

_NUM_CLASSES = 1000
_VOCABULARY, _POSITIONS, _TOKENS = 30522, 512, 64


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


def densenet201() -> ModelTable:
    """Returns DenseNet-201 (402 layers, 604 tensors, 20.0 million values).

    Growth rate 32, bottlenecks of 128 channels. The count includes the classifier.
    """
    table = ModelTable("densenet201")
    growth, bottleneck, channels, size = 32, 128, 64, 56
    table.block = "features"
    table.conv("conv0", 3, channels, (7, 7), 112)
    table.norm("norm0", channels, 112**2)
    for stage, depth in enumerate([6, 12, 48, 32]):
        if stage > 0:
            table.block = f"features.transition{stage}"
            table.norm("norm", channels, size**2)
            table.conv("conv", channels, channels // 2, (1, 1), size)
            channels, size = channels // 2, size // 2
        for index in range(depth):
            table.block = f"features.denseblock{stage + 1}.denselayer{index + 1}"
            table.norm("norm1", channels, size**2)
            table.conv("conv1", channels, bottleneck, (1, 1), size)
            table.norm("norm2", bottleneck, size**2)
            table.conv("conv2", bottleneck, growth, (3, 3), size)
            channels += growth
    table.block = "features.norm5"
    table.norm("", channels, size**2)
    table.block = "classifier"
    table.linear("", channels, _NUM_CLASSES)
    return table


# Modules of Inception-v4: how many follow each other, the channels that they read, the size within them and of their
# output, and their branches: convolutions as "output channels:kernel", each of which reads what the one before it puts
# out. A "+" marks one that reads the same as the one before it: two in parallel. The convolutions of the stem have no
# padding where the size shrinks.
_INCEPTION: list[tuple[int, int, int, int, list[str]]] = [
    (1, 3, 111, 111, ["32:3x3"]),
    (1, 32, 109, 109, ["32:3x3"]),
    (1, 32, 109, 109, ["64:3x3"]),
    (1, 64, 54, 54, ["96:3x3"]),
    (1, 160, 54, 52, ["64:1x1 96:3x3", "64:1x1 64:1x7 64:7x1 96:3x3"]),
    (1, 192, 25, 25, ["192:3x3"]),
    (4, 384, 25, 25, ["96:1x1", "64:1x1 96:3x3", "64:1x1 96:3x3 96:3x3", "96:1x1"]),
    (1, 384, 25, 12, ["384:3x3", "192:1x1 224:3x3 256:3x3"]),
    (7, 1024, 12, 12, ["384:1x1", "192:1x1 224:1x7 256:7x1", "192:1x1 192:7x1 224:1x7 224:7x1 256:1x7", "128:1x1"]),
    (1, 1024, 12, 5, ["192:1x1 192:3x3", "256:1x1 256:1x7 320:7x1 320:3x3"]),
    (3, 1536, 5, 5, ["256:1x1", "384:1x1 256:1x3 +256:3x1", "384:1x1 448:3x1 512:1x3 256:1x3 +256:3x1", "256:1x1"]),
]


def inceptionv4() -> ModelTable:
    """Returns Inception-v4 (299 layers, 449 tensors, 42.7 million values).

    Images are of 224 x 224 as in DeAR Section VI-A, not of 299 x 299. The count includes the classifier, and no
    auxiliary one.
    """
    table = ModelTable("inceptionv4")
    modules = [module for module in _INCEPTION for _ in range(module[0])]
    for index, (_, channels, size_within, size_out, branches) in enumerate(modules):
        table.block = f"features.{index}"
        for number, branch in enumerate(branches):
            convolutions = branch.split()
            inputs, following = channels, channels
            for position, convolution in enumerate(convolutions):
                outputs, height, width = map(int, convolution.replace("x", ":").split(":"))
                inputs = inputs if convolution.startswith("+") else following
                size = size_out if position == len(convolutions) - 1 else size_within
                table.conv(f"branch{number}.{position}.conv", inputs, outputs, (height, width), size)
                table.norm(f"branch{number}.{position}.bn", outputs, size**2)
                following = outputs
    table.block = "last_linear"
    table.linear("", 1536, _NUM_CLASSES)
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
    "densenet201": densenet201,
    "inceptionv4": inceptionv4,
    "bert-base": bert_base,
    "bert-large": bert_large,
}
