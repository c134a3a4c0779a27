"""What tasks share that tell classes apart."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def classify(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the loss on a batch of inputs and labels."""
    inputs, labels = batch
    return cross_entropy(module(inputs), labels)


def num_correct(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Returns how many of a batch the module gets right, and how many there are."""
    inputs, labels = batch
    return (module(inputs).argmax(dim=1) == labels).sum(), len(labels)
