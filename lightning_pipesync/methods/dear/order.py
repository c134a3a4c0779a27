"""In which order gradients become ready and weights are needed."""

from __future__ import annotations

from torch import nn

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport


class ExecutionOrder:
    """What the first step shows, as rank 0 saw it: ranks whose graphs differ, too, must communicate in one order.

    Args:
        parameters: in the order of registration.
        module: whose modules they belong to.
    """

    def __init__(self, parameters: list[NamedParameter], module: nn.Module) -> None:
        self._parameters = parameters
        index_of = {id(parameter.tensor): index for index, parameter in enumerate(parameters)}
        self.parameters_of: dict[nn.Module, list[int]] = {}
        self._owners: list[list[nn.Module]] = [[] for _ in parameters]
        for child in module.modules():
            own = [index_of[id(p)] for p in child.parameters(recurse=False) if id(p) in index_of]
            if own:
                self.parameters_of[child] = own
            for index in own:
                self._owners[index].append(child)
        self._ready: dict[int, None] = {}
        self._needed: dict[int, None] = {}
        self._running: set[nn.Module] = set()
        #: Parameters with a gradient in a step in which no module that registers them has run before.
        self.used_elsewhere: set[int] = set()

    def begin_step(self) -> None:
        """Forgets which modules have run."""
        self._running.clear()

    def runs(self, module: nn.Module) -> None:
        """Notes that a module of ``parameters_of`` starts its forward pass."""
        self._running.add(module)
        self._needed.update(dict.fromkeys(self.parameters_of[module]))

    def is_ready(self, index: int) -> None:
        """Notes that a parameter's gradient is ready."""
        self._ready[index] = None
        if not any(owner in self._running for owner in self._owners[index]):
            self.used_elsewhere.add(index)

    def agree(self, transport: Transport) -> tuple[list[NamedParameter], dict[int, int]]:
        """Returns what rank 0 saw; a collective call.

        Returns:
            The parameters in the order in which their gradients become ready, and for each, by ``id`` of the tensor,
            its position in the order in which their values are needed. Those not seen come last.
        """
        ready, needed = transport.gather_objects((list(self._ready), list(self._needed)))[0]
        count = len(self._parameters)
        ready += sorted(set(range(count)).difference(ready), reverse=True)
        needed += sorted(set(range(count)).difference(needed))
        position = {id(self._parameters[index].tensor): place for place, index in enumerate(needed)}
        return [self._parameters[index] for index in ready], position
