"""The split of a model among stages: of an ``nn.Sequential`` by the cost of its layers, of other models by tracing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pipesync.core.layers import balanced, check_number, flattened, measure, numbers_of_parameters, partition
from lightning_pipesync.methods.ea_pipe.config import SYNCHRONOUS, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.layout import Layout, input_of
from lightning_pipesync.methods.ea_pipe.traced import Tracer


class SequentialSplit:
    """The split of the layers of an ``nn.Sequential``.

    Attributes:
        layers: the layers by name, in order.
    """

    def __init__(self, model: nn.Sequential, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        self.layers = flattened(model)
        self._modules = [layer for _, layer in self.layers]
        self._split, self._num_stages, self._device = config.split, num_stages, device
        check_number(self.layers, num_stages)

    def inspect(self, source: Callable[[], Any]) -> list[int] | None:
        """Returns what the first stage tells the others about the model's first input: the cuts, if measured."""
        if self._split != "balanced":
            return None
        return balanced(*measure(self._modules, source(), self._device), self._num_stages)

    def cuts(self, inspected: list[int] | None) -> list[int]:
        """Returns the indices of the first layers of all stages but the first."""
        if inspected is not None:
            return inspected
        if self._split == "parameters":
            return partition(numbers_of_parameters(self._modules), self._num_stages)
        return [int(index) for index in self._split]


class TracedSplit:
    """The split of any other model, with one layer per stage, made by tracing.

    Attributes:
        layers: the layers by name, in order; none before :meth:`cuts`.
    """

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
        self.layers: list[tuple[str, nn.Module]] = []
        self._tracer = Tracer(model, names, device, config.seed)

    def inspect(self, source: Callable[[], Any]) -> Layout:
        """Returns what the first stage tells the others about the model's first input: its layout."""
        return input_of(source())[0]

    def cuts(self, inspected: Layout) -> list[int]:
        """Traces the layers, and returns the indices of those of all stages but the first."""
        self.layers = self._tracer.stages(inspected)
        return list(range(1, len(self.layers)))


def split_of(
    model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device
) -> SequentialSplit | TracedSplit:
    """Returns the split that the settings choose.

    Raises:
        ValueError: the model cannot be split with these settings.
    """
    if isinstance(model, nn.Sequential) and config.split_names is None:
        return SequentialSplit(model, config, num_stages, device)
    return TracedSplit(model, config, num_stages, device)


def checked_cuts(cuts: Sequence[int], layers: Sequence[tuple[str, nn.Module]], num_stages: int) -> list[int]:
    """Returns ``cuts`` after checking them.

    Raises:
        ValueError: they do not split the layers into ``num_stages`` stages, or two stages would share a parameter.
    """
    if len(cuts) != num_stages - 1 or any(cut >= len(layers) for cut in cuts):
        raise ValueError(
            f"split={tuple(cuts)!r} must name the first layers of the second to the last of {num_stages} stages: "
            f"{num_stages - 1} indices below {len(layers)}."
        )
    owners: dict[int, tuple[int, str]] = {}
    for i, (name, layer) in enumerate(layers):
        stage = sum(cut <= i for cut in cuts)
        for tensor in [*layer.parameters(), *layer.buffers()]:
            owner, other = owners.setdefault(id(tensor), (stage, name))
            if owner != stage:
                raise ValueError(
                    f"Layers {other} and {name} share a parameter or buffer, and are on stages {owner} and {stage}: "
                    "set split= so that they are on one stage, or give each its own parameters."
                )
    return list(cuts)
