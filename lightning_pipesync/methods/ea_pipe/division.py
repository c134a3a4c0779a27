"""How a model is divided into stages: by its layers, or by tracing it."""

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


class Division(ABC):
    """Divides a model into layers, and these among stages.

    Attributes:
        layers: by name, in order; none as long as the first mini-batch has to be seen first.
    """

    layers: list[tuple[str, nn.Module]]

    @abstractmethod
    def look(self, source: Callable[[], Any]) -> Any:
        """Returns what all ranks have to know of the first mini-batch; called where the first stage is.

        Args:
            source: returns the model's input.
        """

    @abstractmethod
    def cut(self, seen: Any) -> list[int]:
        """Returns the indices of the first layers of all stages but the first.

        Args:
            seen: what :meth:`look` has returned.

        Raises:
            ValueError: the model cannot be cut.
        """


class SequentialDivision(Division):
    """The layers are those of an ``nn.Sequential``."""

    def __init__(self, model: nn.Sequential, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        self.layers = split.flattened(model)
        self._split, self._num_stages, self._device = config.split, num_stages, device
        split.check_number(self.layers, num_stages)

    def look(self, source: Callable[[], Any]) -> list[int] | None:
        if self._split != "balanced":
            return None
        return split.balanced(*split.measure(self._modules(), source(), self._device), self._num_stages)

    def cut(self, seen: list[int]) -> list[int]:
        if self._split == "balanced":
            return seen
        if self._split == "parameters":
            return split.partition(split.numbers_of_parameters(self._modules()), self._num_stages)
        return [int(index) for index in self._split]

    def _modules(self) -> list[nn.Module]:
        return [layer for _, layer in self.layers]


class TracedDivision(Division):
    """One layer for each stage, made by tracing."""

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

    def look(self, source: Callable[[], Any]) -> Layout:
        return input_of(source())[0]

    def cut(self, seen: Layout) -> list[int]:
        self.layers = self._tracer.stages(seen)
        return list(range(1, len(self.layers)))


def division_of(model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device) -> Division:
    """Returns how a model is divided, by the settings.

    Raises:
        ValueError: there is no way to.
    """
    if isinstance(model, nn.Sequential) and config.split_names is None:
        return SequentialDivision(model, config, num_stages, device)
    return TracedDivision(model, config, num_stages, device)
