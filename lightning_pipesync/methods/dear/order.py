"""In which order gradients become ready and weights are needed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_pipesync.core.parameters import NamedParameter, modules_with_parameters
from lightning_pipesync.core.transport import Transport


class ExecutionOrder:
    """What the steps show, as rank 0 saw it: ranks whose graphs differ, too, must communicate in one order.

    Attributes:
        modules: those that register parameters.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = modules_with_parameters(module)
        self._owners: dict[int, list[nn.Module]] = {}
        for child in self.modules:
            for parameter in child.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(child)
        self._running: set[nn.Module] = set()
        self._idle: dict[int, Tensor] = {}
        for child in self.modules:
            self._idle.update((id(parameter), parameter) for parameter in child.parameters(recurse=False))
        self._ready: dict[int, None] = {}  # ids of tensors, in the order of their gradients
        self._needed: dict[int, None] = {}  # in the order of the forward pass
        self._used_elsewhere: dict[int, Tensor] = {}

    @property
    def used_elsewhere(self) -> list[Tensor]:
        """Parameters that may be read where no module that registers them runs.

        Those with a gradient in a step in which no such module ran before, and those of which none has ever run.
        """
        return [*self._used_elsewhere.values(), *self._idle.values()]

    def begin_step(self) -> None:
        """Forgets which modules have run."""
        self._running.clear()

    def runs(self, module: nn.Module) -> None:
        """Notes that one of the ``modules`` starts its forward pass."""
        if module not in self._running:
            self._running.add(module)
            for parameter in module.parameters(recurse=False):
                self._needed[id(parameter)] = None
                self._idle.pop(id(parameter), None)

    def is_ready(self, parameter: Tensor) -> None:
        """Notes that a parameter's gradient is ready."""
        self._ready[id(parameter)] = None
        if self._running.isdisjoint(self._owners.get(id(parameter), ())):
            self._used_elsewhere[id(parameter)] = parameter

    def agree(
        self, parameters: Sequence[NamedParameter], transport: Transport
    ) -> tuple[list[NamedParameter], list[str]]:
        """Returns what rank 0 saw; a collective call.

        Returns:
            The parameters in the order in which their gradients become ready, and their names in the order in which
            their values are needed. Those not seen come last.
        """
        index_of = {id(parameter.tensor): index for index, parameter in enumerate(parameters)}
        seen = [[index_of[key] for key in keys if key in index_of] for keys in (self._ready, self._needed)]
        ready, needed = transport.gather_objects(seen)[0]
        ready += sorted(set(range(len(parameters))).difference(ready), reverse=True)
        needed += sorted(set(range(len(parameters))).difference(needed))
        return [parameters[index] for index in ready], [parameters[index].name for index in needed]
