"""``optimizer.state`` of optimizers whose states are elsewhere: in shards of the ranks, or on servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class GuardedStates(defaultdict[Tensor, dict[str, Any]]):
    """States by parameter, as any optimizer's. While they are away it is empty, and every use of it raises.

    It stays with the optimizer when the method ends, open: a wrapper, such as Fabric's, may refer to it.

    Attributes:
        where: where the states are, and how to read and change them; empty while they are here.
    """

    where = ""

    def __init__(self, states: dict[Tensor, dict[str, Any]]) -> None:
        super().__init__(dict, states)

    def __reduce__(self) -> Any:
        self._check()
        return defaultdict, (dict, dict(self))

    def _check(self) -> None:
        if self.where:
            raise RuntimeError(self.where)


def _guarded(name: str) -> Any:
    unguarded = getattr(defaultdict, name)

    def method(states: GuardedStates, *args: Any, **kwargs: Any) -> Any:
        states._check()
        return unguarded(states, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(GuardedStates, _name, _guarded(_name))


def send_away(optimizer: Optimizer, holder: str) -> None:
    """Makes every use of ``optimizer.state`` raise a RuntimeError, until :func:`bring_back`, or a state is loaded.

    ``holder``: what has the states, the subject of a sentence.
    """
    states = optimizer.state if isinstance(optimizer.state, GuardedStates) else GuardedStates(optimizer.state)
    states.where = (
        f"{holder} the state of {type(optimizer).__name__}: optimizer.state has nothing of it. To read it, all ranks "
        "call optimizer_state_dict(optimizer) of sync, of trainer.strategy.method or of "
        "fabric.strategy.method_of(optimizer); with Accelerate optimizer.state_dict(). To change it, all ranks load "
        "what that returns, changed, by optimizer.load_state_dict()."
    )
    optimizer.state = states


def bring_back(optimizer: Optimizer) -> None:
    """Undoes :func:`send_away`; what was away is still to be written to ``optimizer.state``."""
    if isinstance(optimizer.state, GuardedStates):
        optimizer.state.where = ""


@contextmanager
def at_hand(optimizer: Optimizer) -> Iterator[dict[Tensor, dict[str, Any]]]:
    """Context in which ``optimizer.state``, its value, may be used: it has what is not away."""
    states = optimizer.state
    if not isinstance(states, GuardedStates):
        yield states
        return
    where, states.where = states.where, ""
    try:
        yield states
    finally:
        states.where = where
