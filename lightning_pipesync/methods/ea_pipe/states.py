"""The optimizer states of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: The state of an optimizer, such as momentum, by parameter.
State = dict[Any, Any]


class OptimizerStates:
    """Several states of one optimizer, which has one of them loaded. All start as its current state.

    The user's optimizer itself steps, so that its hooks run and learning rate schedulers apply to all replicas.

    Args:
        optimizer: the optimizer.
        parameters: the parameters whose state is kept; that of others is dropped.
        count: the number of states.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], count: int) -> None:
        self._optimizer, self._parameters, self._count = optimizer, list(parameters), count
        self.reset()

    def reset(self) -> None:
        """Sets all states to the optimizer's current one."""
        self._states: list[State] = [_copied(self._optimizer.state, self._parameters) for _ in range(self._count)]
        self._loaded = 0
        self._put(0)

    def load(self, index: int) -> None:
        """Loads state ``index`` into the optimizer, after storing the one that was loaded."""
        self._states[self._loaded] = dict(self._optimizer.state)
        self._put(index)

    def _put(self, index: int) -> None:
        self._loaded = index
        self._optimizer.state.clear()
        self._optimizer.state.update(self._states[index])

    def state(self) -> list[dict[str, Any]]:
        """Returns copies of the states in the form of ``Optimizer.state_dict``."""
        found = []
        for index in range(self._count):
            self.load(index)
            found.append(deepcopy(self._optimizer.state_dict()))
        return found

    def mean(self) -> dict[int, Any]:
        """Returns one state, by the index of the parameter: the means of tensors, and the maxima of single numbers."""
        states = [saved["state"] for saved in self.state()]
        indices = {index for state in states for index in state}
        return {index: _mean([state[index] for state in states if index in state]) for index in sorted(indices)}

    def load_state(self, state: list[dict[str, Any]]) -> None:
        """Loads the result of :meth:`state`."""
        for index, saved in enumerate(state):
            self.load(index)
            self._optimizer.load_state_dict(saved)


def _copied(state: State, parameters: Sequence[Tensor]) -> State:
    return {parameter: deepcopy(dict(state[parameter])) for parameter in parameters if parameter in state}


def _mean(states: list[State]) -> State:
    """Returns the mean of the replicas' states of one parameter."""
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
