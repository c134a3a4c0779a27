"""Tables of further networks: those of DeAR Table I in the order of timm, and GPT-2 in that of transformers."""

from __future__ import annotations

from lightning_pipesync.lab.bench.models import ModelTable

_NUM_CLASSES = 1000


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


def gpt2() -> ModelTable:
    """Returns GPT-2 small (75 layers, 148 tensors, 124.4 million values), on sequences of 1,024 tokens.

    The output matrix is the token embedding, tied, and counted once; its work is that of the last norm, before it.
    """
    table, hidden, tokens, vocabulary = ModelTable("gpt2"), 768, 1024, 50257
    table.block = "transformer.embeddings"
    table.embedding("wte", vocabulary, hidden, tokens)
    table.embedding("wpe", tokens, hidden, tokens)
    for index in range(12):
        table.block = f"transformer.h.{index}"
        table.norm("ln_1", hidden, tokens)
        table.linear("attn.c_attn", hidden, 3 * hidden, tokens)
        table.linear("attn.c_proj", hidden, hidden, tokens)
        table.norm("ln_2", hidden, tokens)
        table.linear("mlp.c_fc", hidden, 4 * hidden, tokens)
        table.linear("mlp.c_proj", 4 * hidden, hidden, tokens)
    table.block = "transformer.ln_f"
    table.add("", 2 * (vocabulary + 1) * hidden * tokens, weight=(hidden,), bias=(hidden,))
    return table
