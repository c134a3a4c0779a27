"""Tables of image classifiers, those in DeAR Table I and AlexNet: 1000 classes, images of 3 x 224 x 224."""

from __future__ import annotations

import math

from lightning_pipesync.lab.bench.models.table import ModelTable, TableBuilder

_NUM_CLASSES = 1000


def alexnet() -> ModelTable:
    """Returns AlexNet (8 layers, 16 tensors, 61.1 million values), in torchvision's order: few large tensors."""
    builder = TableBuilder()
    convolutions = [(3, 64, 11, 55), (64, 192, 5, 27), (192, 384, 3, 13), (384, 256, 3, 13), (256, 256, 3, 13)]
    for index, (inputs, outputs, kernel, size) in enumerate(convolutions):
        builder.block = f"features.{index}"
        weight = (outputs, inputs, kernel, kernel)
        builder.add("", 2 * math.prod(weight) * size**2, weight=weight, bias=(outputs,))
    for index, (inputs, outputs) in enumerate([(256 * 6 * 6, 4096), (4096, 4096), (4096, _NUM_CLASSES)]):
        builder.block = f"classifier.{index}"
        builder.linear("", inputs, outputs)
    return builder.build("alexnet")


def resnet50() -> ModelTable:
    """Returns ResNet-50 (107 layers, 161 tensors, 25.6 million values), in torchvision's order.

    The stride of a bottleneck is in its 3 x 3 convolution. The count includes the classifier.
    """
    builder = TableBuilder()

    def conv_norm(name: str, inputs: int, outputs: int, kernel: int, size: int, norm: str = "") -> None:
        builder.conv(name, inputs, outputs, (kernel, kernel), size)
        builder.norm(norm or name.replace("conv", "bn"), outputs, size**2)

    conv_norm("conv1", 3, 64, 7, 112)
    channels = 64
    for stage, (depth, width, size) in enumerate([(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)]):
        for index in range(depth):
            builder.block = f"layer{stage + 1}.{index}"
            size_in = size * 2 if index == 0 and stage > 0 else size
            conv_norm("conv1", channels, width, 1, size_in)
            conv_norm("conv2", width, width, 3, size)
            conv_norm("conv3", width, 4 * width, 1, size)
            if index == 0:
                conv_norm("downsample.0", channels, 4 * width, 1, size, norm="downsample.1")
            channels = 4 * width
    builder.block = "fc"
    builder.linear("", channels, _NUM_CLASSES)
    return builder.build("resnet50")


def densenet201() -> ModelTable:
    """Returns DenseNet-201 (402 layers, 604 tensors, 20.0 million values), in torchvision's order.

    Growth rate 32, bottlenecks of 128 channels. The count includes the classifier.
    """
    builder = TableBuilder()
    growth, bottleneck, channels, size = 32, 128, 64, 56
    builder.block = "features"
    builder.conv("conv0", 3, channels, (7, 7), 112)
    builder.norm("norm0", channels, 112**2)
    for stage, depth in enumerate([6, 12, 48, 32]):
        if stage > 0:
            builder.block = f"features.transition{stage}"
            builder.norm("norm", channels, size**2)
            builder.conv("conv", channels, channels // 2, (1, 1), size)
            channels, size = channels // 2, size // 2
        for index in range(depth):
            builder.block = f"features.denseblock{stage + 1}.denselayer{index + 1}"
            builder.norm("norm1", channels, size**2)
            builder.conv("conv1", channels, bottleneck, (1, 1), size)
            builder.norm("norm2", bottleneck, size**2)
            builder.conv("conv2", bottleneck, growth, (3, 3), size)
            channels += growth
    builder.block = "features.norm5"
    builder.norm("", channels, size**2)
    builder.block = "classifier"
    builder.linear("", channels, _NUM_CLASSES)
    return builder.build("densenet201")


# Branches of a module of Inception-v4: convolutions as "output channels:kernel", each of which reads what the one
# before it puts out. A "+" marks one that reads the same as the one before it: two in parallel.
_INCEPTION_A = ["96:1x1", "64:1x1 96:3x3", "64:1x1 96:3x3 96:3x3", "96:1x1"]
_INCEPTION_B = [
    "384:1x1",
    "192:1x1 224:1x7 256:7x1",
    "192:1x1 192:7x1 224:1x7 224:7x1 256:1x7",
    "128:1x1",
]
_INCEPTION_C = [
    "256:1x1",
    "384:1x1 256:1x3 +256:3x1",
    "384:1x1 448:3x1 512:1x3 256:1x3 +256:3x1",
    "256:1x1",
]


def inceptionv4() -> ModelTable:
    """Returns Inception-v4 (299 layers, 449 tensors, 42.7 million values), in timm's order.

    Images are of 224 x 224 as in DeAR Section VI-A, not of 299 x 299. The count includes the classifier, and no
    auxiliary one.
    """
    builder = TableBuilder()
    index = 0

    def module(channels: int, branches: list[str], size_in: int, size: int) -> None:
        """Adds a module; the last convolution of a branch puts out ``size x size``, those before it ``size_in``."""
        nonlocal index
        builder.block = f"features.{index}"
        index += 1
        for number, branch in enumerate(branches):
            convolutions = branch.split()
            inputs, following = channels, channels
            for position, convolution in enumerate(convolutions):
                outputs, kernel = convolution.lstrip("+").split(":")
                height, width = (int(side) for side in kernel.split("x"))
                inputs = inputs if convolution.startswith("+") else following
                output_size = size if position == len(convolutions) - 1 else size_in
                builder.conv(f"branch{number}.{position}.conv", inputs, int(outputs), (height, width), output_size)
                builder.norm(f"branch{number}.{position}.bn", int(outputs), output_size**2)
                following = int(outputs)

    # The stem; its convolutions have no padding where the size shrinks.
    module(3, ["32:3x3"], 111, 111)
    module(32, ["32:3x3"], 109, 109)
    module(32, ["64:3x3"], 109, 109)
    module(64, ["96:3x3"], 54, 54)
    module(160, ["64:1x1 96:3x3", "64:1x1 64:1x7 64:7x1 96:3x3"], 54, 52)
    module(192, ["192:3x3"], 25, 25)
    for _ in range(4):
        module(384, _INCEPTION_A, 25, 25)
    module(384, ["384:3x3", "192:1x1 224:3x3 256:3x3"], 25, 12)
    for _ in range(7):
        module(1024, _INCEPTION_B, 12, 12)
    module(1024, ["192:1x1 192:3x3", "256:1x1 256:1x7 320:7x1 320:3x3"], 12, 5)
    for _ in range(3):
        module(1536, _INCEPTION_C, 5, 5)
    builder.block = "last_linear"
    builder.linear("", 1536, _NUM_CLASSES)
    return builder.build("inceptionv4")
