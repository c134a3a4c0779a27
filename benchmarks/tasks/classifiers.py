"""The papers' image classifiers, as sequences of layers, which a pipeline can split into stages.

They compute what torchvision's do, whose layers they have, with initial weights of the same distributions: VGG-11 with
1000 classes has the 507 MB of SelSync Section II-A.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import relu

#: Blocks of a ResNet in each of its four parts, by the number of its layers (He et al., Table 1).
_RESNETS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
#: The layers from which on a ResNet's blocks are bottlenecks.
_BOTTLENECKS_FROM = 50
#: Convolutions of a VGG in each of its five parts, by the number of its layers (Simonyan and Zisserman, Table 1: A, D).
_VGGS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3)}


class ResidualBlock(nn.Module):
    """A block whose output is its branch's plus its input, which ``shortcut`` brings to the branch's shape."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output (batch, channels, height, width)."""
        return relu(self.branch(x) + self.shortcut(x))


def resnet(
    depth: int, num_classes: int, width: int = 64, channels: int = 3, for_small_images: bool = False
) -> nn.Sequential:
    """Returns a ResNet with 18, 34, 50 or 101 layers.

    Args:
        depth: number of layers.
        num_classes: number of outputs.
        width: channels of the first convolution; each of the four parts doubles them.
        channels: of the images.
        for_small_images: the first convolution is of 3 x 3 with stride 1, and no pooling follows, as in the ResNets for
            CIFAR-10 (He et al., Section 4.2).
    """
    is_bottleneck = depth >= _BOTTLENECKS_FROM
    if for_small_images:
        layers = [_convolution(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
    else:
        layers = [_convolution(channels, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = width
    for part, num_blocks in enumerate(_RESNETS[depth]):
        within = width * 2**part
        outputs = 4 * within if is_bottleneck else within
        for block in range(num_blocks):
            stride = 2 if part and not block else 1
            shortcut: nn.Module = nn.Identity()
            if stride > 1 or inputs != outputs:
                shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            branch = _bottleneck(inputs, within, stride) if is_bottleneck else _basic(inputs, within, stride)
            layers.append(ResidualBlock(branch, shortcut))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


def vgg(depth: int, num_classes: int) -> nn.Sequential:
    """Returns a VGG with 11 or 16 layers, without batch norm, for images of 3 channels."""
    layers: list[nn.Module] = []
    inputs = 3
    for repeats, outputs in zip(_VGGS[depth], (64, 128, 256, 512, 512), strict=True):
        for _ in range(repeats):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            layers += [convolution, nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    dense = [nn.Linear(before, after) for before, after in pairwise([512 * 7 * 7, 4096, 4096, num_classes])]
    for layer in dense:
        nn.init.normal_(layer.weight, std=0.01)
        nn.init.zeros_(layer.bias)
    first, second, last = dense
    hidden = [first, nn.ReLU(), nn.Dropout(), second, nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *hidden, last)


def alexnet(num_classes: int) -> nn.Sequential:
    """Returns AlexNet, in the form of one tower, for images of 3 channels."""
    features = [
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
    ]
    hidden = [nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(6), nn.Flatten(), *hidden, nn.Linear(4096, num_classes))


def _basic(inputs: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(
        *(_convolution(inputs, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU()),
        *(_convolution(width, width, 3), nn.BatchNorm2d(width)),
    )


def _bottleneck(inputs: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(
        *(_convolution(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU()),
        *(_convolution(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU()),
        *(_convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)),
    )


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Any:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
