"""Tables of networks in DeAR Table I, and of AlexNet, in the order of torchvision and transformers.

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
