"""One optimizer, and a state of it for every replica."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

#: What an optimizer keeps for its parameters, momentum for instance.
State = dict[Any, Any]


class OptimizerStates:
    """States of one optimizer, of which it has one at a time. All begin with what it has.

    The optimizer stays the user's own, so that its hooks run and learning rate schedulers drive all replicas.

    Args:
        optimizer: the optimizer.
        count: how many states.
    """

    def __init__(self, optimizer: Optimizer, count: int) -> None:
        self._optimizer = optimizer
        self._states: list[State] = [_copied(optimizer.state) for _ in range(count)]

    def load(self, index: int) -> None:
        """Has the optimizer go on from state ``index``."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._states[index])

    def keep(self, index: int) -> None:
        """Makes state ``index`` what the optimizer has now."""
        self._states[index] = dict(self._optimizer.state)

    def state(self) -> list[dict[str, Any]]:
        """Returns copies of the states as ``Optimizer.state_dict`` has them."""
        found = []
        for index in range(len(self._states)):
            self.load(index)
            found.append(deepcopy(self._optimizer.state_dict()))
        return found

    def load_state(self, state: list[dict[str, Any]]) -> None:
        """Takes over what :meth:`state` returned."""
        for index, saved in enumerate(state):
            self._optimizer.load_state_dict(saved)
            self.keep(index)


def _copied(state: State) -> State:
    return {
        parameter: {name: value.clone() if hasattr(value, "clone") else value for name, value in values.items()}
        for parameter, values in state.items()
    }
