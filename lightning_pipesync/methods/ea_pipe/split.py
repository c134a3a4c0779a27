"""The split of a model among stages: of an ``nn.Sequential`` by its layers, of other models by tracing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.layers import balanced, check_number, flattened, measure, numbers_of_parameters, partition
from lightning_pipesync.methods.ea_pipe.config import SYNCHRONOUS, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.layout import Layout, input_of
from lightning_pipesync.methods.ea_pipe.traced import Tracer


class ModelSplit(ABC):
    """The layers of a model, and where stages begin."""

    layers: list[tuple[str, nn.Module]]  # by name; of a traced model none before :meth:`choose`

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.cuts: list[int] = []  # the indices of the first layers of all stages but the first

    @abstractmethod
    def inspect(self, source: Callable[[], Any]) -> Any:
        """Called on the first stage with the source of the model's first input; all stages get the result."""

    @abstractmethod
    def choose(self, inspected: Any) -> list[int]:
        """Returns the cuts for the result of :meth:`inspect`."""

    def cut(self, cuts: Sequence[int]) -> None:
        """Sets :attr:`cuts`; raises a ValueError if a stage would have no layers, or two would share a parameter."""
        if len(cuts) != self._num_stages - 1 or any(cut >= len(self.layers) for cut in cuts):
            raise ValueError(
                f"split={tuple(cuts)!r} must name the first layers of the second to the last of {self._num_stages} "
                f"stages: {self._num_stages - 1} indices below {len(self.layers)}."
            )
        owners: dict[int, tuple[int, str]] = {}
        for i, (name, layer) in enumerate(self.layers):
            stage = sum(cut <= i for cut in cuts)
            for tensor in [*layer.parameters(), *layer.buffers()]:
                owner, other = owners.setdefault(id(tensor), (stage, name))
                if owner != stage:
                    raise ValueError(
                        f"Layers {other} and {name} share a parameter or buffer, and are on stages {owner} and "
                        f"{stage}: set split= so that they are on one stage, or give each its own parameters."
                    )
        self.cuts = list(cuts)

    def named_layers_of(self, stage: int) -> list[tuple[str, nn.Module]]:
        start, end = [0, *self.cuts, len(self.layers)][stage : stage + 2]
        return self.layers[start:end]

    def layers_of(self, stage: int) -> list[nn.Module]:
        return [layer for _, layer in self.named_layers_of(stage)]

    def tensors_of(self, stage: int) -> list[Tensor]:
        """Returns the parameters of a stage and then its buffers, each once."""
        layers = nn.ModuleList(self.layers_of(stage))
        return [*layers.parameters(), *layers.buffers()]


class SequentialSplit(ModelSplit):
    """The split of the layers of an ``nn.Sequential``."""

    def __init__(self, model: nn.Sequential, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        super().__init__(num_stages)
        self.layers = flattened(model)
        self._modules = [layer for _, layer in self.layers]
        self._split, self._device = config.split, device
        check_number(self.layers, num_stages)

    def inspect(self, source: Callable[[], Any]) -> list[int] | None:
        if self._split != "balanced":
            return None
        return balanced(*measure(self._modules, source(), self._device), self._num_stages)

    def choose(self, inspected: list[int] | None) -> list[int]:
        if inspected is not None:
            return inspected
        if self._split == "parameters":
            return partition(numbers_of_parameters(self._modules), self._num_stages)
        return [int(index) for index in self._split]


class TracedSplit(ModelSplit):
    """The split of any other model, with one layer per stage, made by tracing."""

    def __init__(self, model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        super().__init__(num_stages)
        name, names = type(model).__name__, config.split_names or ()
        if config.algorithm in SYNCHRONOUS:
            raise ValueError(
                f"algorithm={config.algorithm!r} takes the layers of an nn.Sequential, and {name} would have to be "
                "traced: make it one, without names in split=, or choose another algorithm."
            )
        if not names and num_stages > 1:
            raise ValueError(
                f"{name} is not an nn.Sequential, and split={config.split!r} does not say where to divide it: set "
                "split= to the names of the submodules with which the later stages begin."
            )
        if len(names) != num_stages - 1:
            raise ValueError(
                f"split={names!r} must name the submodules with which the stages after the first begin, "
                f"{num_stages - 1} of them."
            )
        self.layers = []
        self._tracer = Tracer(model, names, device, config.seed)

    def inspect(self, source: Callable[[], Any]) -> Layout:
        return input_of(source())[0]

    def choose(self, inspected: Layout) -> list[int]:
        self.layers = self._tracer.stages(inspected)
        return list(range(1, len(self.layers)))


def split_of(model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device) -> ModelSplit:
    if isinstance(model, nn.Sequential) and config.split_names is None:
        return SequentialSplit(model, config, num_stages, device)
    return TracedSplit(model, config, num_stages, device)
