"""One optimizer, and a state of it for every replica."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: What an optimizer keeps for its parameters, momentum for instance.
State = dict[Any, Any]


class OptimizerStates:
    """States of one optimizer, of which it has one at a time. All begin with what it has.

    The optimizer stays the user's own, so that its hooks run and learning rate schedulers drive all replicas.

    Args:
        optimizer: the optimizer.
        parameters: whose state there is; what it has for others is dropped.
        count: how many states.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], count: int) -> None:
        self._optimizer, self._parameters, self._count = optimizer, list(parameters), count
        self.begin_anew()

    def begin_anew(self) -> None:
        """Makes all states what the optimizer has now."""
        self._states: list[State] = [_copied(self._optimizer.state, self._parameters) for _ in range(self._count)]
        self._loaded = 0
        self._put(0)

    def load(self, index: int) -> None:
        """Has the optimizer go on from state ``index``; what it has until now stays that of the state before."""
        self._states[self._loaded] = dict(self._optimizer.state)
        self._put(index)

    def _put(self, index: int) -> None:
        self._loaded = index
        self._optimizer.state.clear()
        self._optimizer.state.update(self._states[index])

    def state(self) -> list[dict[str, Any]]:
        """Returns copies of the states as ``Optimizer.state_dict`` has them."""
        found = []
        for index in range(self._count):
            self.load(index)
            found.append(deepcopy(self._optimizer.state_dict()))
        return found

    def mean(self) -> dict[int, Any]:
        """Returns one state, by the number of the parameter: means of tensors, and the largest of single numbers."""
        states = [saved["state"] for saved in self.state()]
        indices = {index for state in states for index in state}
        return {index: _mean([state[index] for state in states if index in state]) for index in sorted(indices)}

    def load_state(self, state: list[dict[str, Any]]) -> None:
        """Takes over what :meth:`state` returned."""
        for index, saved in enumerate(state):
            self.load(index)
            self._optimizer.load_state_dict(saved)


def _copied(state: State, parameters: Sequence[Tensor]) -> State:
    return {parameter: deepcopy(dict(state[parameter])) for parameter in parameters if parameter in state}


def _mean(states: list[State]) -> State:
    """Returns the mean of what replicas keep for one parameter."""
    found = {}
    for name in states[0]:
        values = [state[name] for state in states]
        if all(isinstance(value, Tensor) and value.dim() and value.is_floating_point() for value in values):
            found[name] = torch.stack(values).mean(dim=0)
        elif all(isinstance(value, (Tensor, int, float)) and not getattr(value, "ndim", 0) for value in values):
            found[name] = max(values)
        else:
            found[name] = values[0]
    return found
