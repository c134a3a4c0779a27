"""The partition of a model into stages, by its layers or by tracing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pipesync.methods.ea_pipe import split
from lightning_pipesync.methods.ea_pipe.config import SYNCHRONOUS, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.layout import Layout, input_of
from lightning_pipesync.methods.ea_pipe.traced import Tracer


class Partition(ABC):
    """The layers of a model, and their partition into stages.

    Attributes:
        layers: the layers by name, in order; empty until the first mini-batch if they depend on it.
    """

    layers: list[tuple[str, nn.Module]]

    @abstractmethod
    def inspect(self, source: Callable[[], Any]) -> Any:
        """Returns what all ranks need to know of the first mini-batch; called on the rank of the first stage.

        Args:
            source: returns the model's input.
        """

    @abstractmethod
    def choose_cuts(self, inspected: Any) -> list[int]:
        """Returns the indices of the first layers of all stages but the first.

        Args:
            inspected: the result of :meth:`inspect`.

        Raises:
            ValueError: the model cannot be partitioned.
        """


class SequentialPartition(Partition):
    """The layers of an ``nn.Sequential``."""

    def __init__(self, model: nn.Sequential, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        self.layers = split.flattened(model)
        self._split, self._num_stages, self._device = config.split, num_stages, device
        split.check_number(self.layers, num_stages)

    def inspect(self, source: Callable[[], Any]) -> list[int] | None:
        if self._split != "balanced":
            return None
        return split.balanced(*split.measure(self._modules(), source(), self._device), self._num_stages)

    def choose_cuts(self, inspected: list[int]) -> list[int]:
        if self._split == "balanced":
            return inspected
        if self._split == "parameters":
            return split.partition(split.numbers_of_parameters(self._modules()), self._num_stages)
        return [int(index) for index in self._split]

    def _modules(self) -> list[nn.Module]:
        return [layer for _, layer in self.layers]


class TracedPartition(Partition):
    """One layer per stage, made by tracing."""

    def __init__(self, model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        name, names = type(model).__name__, config.split_names or ()
        if config.algorithm in SYNCHRONOUS:
            raise ValueError(
                f"algorithm={config.algorithm!r} takes the layers of an nn.Sequential, and {name} would have to be "
                "traced: make it one, without names in split=, or choose another algorithm."
            )
        if not names and num_stages > 1:
            raise ValueError(
                f"{name} is no nn.Sequential, and split={config.split!r} does not say where to divide it: set split= "
                "to the names of the submodules with which the later stages begin."
            )
        if len(names) != num_stages - 1:
            raise ValueError(
                f"split={names!r} must have as many names as there are stages after the first, {num_stages - 1} of "
                "them: of the submodules with which they begin."
            )
        self.layers = []
        self._tracer = Tracer(model, names, device, config.seed)

    def inspect(self, source: Callable[[], Any]) -> Layout:
        return input_of(source())[0]

    def choose_cuts(self, inspected: Layout) -> list[int]:
        self.layers = self._tracer.stages(inspected)
        return list(range(1, len(self.layers)))


def make_partition(model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device) -> Partition:
    """Returns the partition that the settings choose.

    Raises:
        ValueError: the model cannot be partitioned with these settings.
    """
    if isinstance(model, nn.Sequential) and config.split_names is None:
        return SequentialPartition(model, config, num_stages, device)
    return TracedPartition(model, config, num_stages, device)
