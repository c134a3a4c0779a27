"""How a model is divided into stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pipesync.methods.ea_pipe import split
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig


class Division(ABC):
    """Divides a model into layers, and these among stages.

    Attributes:
        layers: by name, in order.
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
        return list(self._split)

    def _modules(self) -> list[nn.Module]:
        return [layer for _, layer in self.layers]
