"""Versions of a stage's tensors, and of the state of its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.parameters import load_optimizer_state
from lightning_pipesync.core.torch_private import version

#: The state of an optimizer, such as momentum, by parameter.
State = dict[Any, Any]


class Versions:
    """Versions of tensors on one device, one of which is loaded; each is in one flat buffer per dtype.

    Loading swaps the tensors' data instead of copying: the backward pass of a graph needs the version of its forward
    pass. All versions start with the tensors' current values. The last one is the master.
    """

    def __init__(self, tensors: Sequence[Tensor], count: int) -> None:
        self._tensors = list(tensors)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(self._tensors):
            by_dtype.setdefault(tensor.dtype, []).append(i)
        self._flats: list[list[Tensor]] = []
        self._views: list[list[Tensor]] = []
        for _ in range(count):
            views: list[Tensor] = [tensor.data for tensor in self._tensors]
            flats = []
            for members in by_dtype.values():
                bucket = Bucket([views[i] for i in members])
                bucket.pack([views[i] for i in members])
                flats.append(bucket.flat)
                for i, view in zip(members, bucket.views, strict=True):
                    views[i] = view
            self._flats.append(flats)
            self._views.append(views)
        self._forces = [torch.empty_like(flat) for flat in self._flats[0]] if count > 1 else []
        self.load(0)

    def load(self, index: int) -> None:
        for tensor, view in zip(self._tensors, self._views[index], strict=True):
            tensor.data = view

    def load_master(self, watched: Sequence[Tensor]) -> None:
        """Loads the master, and watches some of the tensors for writes."""
        self.load(len(self._flats) - 1)
        self._watched = [(tensor, version(tensor), tensor.data_ptr()) for tensor in watched]

    def written(self) -> bool:
        """Returns whether a watched tensor was written to, or its data replaced, since :meth:`load_master`."""
        return any((version(tensor), tensor.data_ptr()) != (mark, place) for tensor, mark, place in self._watched)

    @torch.no_grad()
    def reset(self) -> None:
        """Sets all versions to the current values of the tensors, which have the master loaded."""
        master = len(self._flats) - 1
        for tensor, view in zip(self._tensors, self._views[master], strict=True):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        self.load(master)
        for index in range(master):
            self.copy(master, index)

    def views(self, index: int) -> list[Tensor]:
        """Returns the tensors of a version."""
        return self._views[index]

    def floating(self, index: int) -> list[Tensor]:
        return [flat for flat in self._flats[index] if flat.is_floating_point()]

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        for copied, flat in zip(self._flats[target], self._flats[source], strict=True):
            copied.copy_(flat)

    @torch.no_grad()
    def pull(self, index: int, master: int, elastic_force: float) -> None:
        """Pulls version ``index`` and the master together (Eq. 1). The master takes the replica's integers."""
        for replica, center, force in zip(self._flats[index], self._flats[master], self._forces, strict=True):
            if replica.is_floating_point():
                torch.sub(replica, center, out=force).mul_(elastic_force)
                replica.sub_(force)
                center.add_(force)
            else:
                center.copy_(replica)

    def state(self) -> list[list[Tensor]]:
        """Returns copies of the flat buffers, by version and dtype."""
        return [[flat.cpu().clone() for flat in flats] for flats in self._flats]

    @torch.no_grad()
    def load_state(self, state: list[list[Tensor]]) -> None:
        for flats, saved in zip(self._flats, state, strict=True):
            for flat, values in zip(flats, saved, strict=True):
                flat.copy_(values)


class OptimizerStates:
    """Several states of one optimizer, which has one of them loaded. All start as its current state.

    The user's optimizer steps, so that its hooks run and learning rate schedulers apply to all replicas. The state of
    parameters of other stages is dropped.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], count: int) -> None:
        self._optimizer, self._parameters, self._count = optimizer, list(parameters), count
        self.reset()

    def reset(self) -> None:
        """Sets all states to the optimizer's current one."""
        current = self._optimizer.state
        held = [parameter for parameter in self._parameters if parameter in current]
        self._states: list[State] = [{p: deepcopy(dict(current[p])) for p in held} for _ in range(self._count)]
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
        """Returns the :func:`mean_state` of the states."""
        return mean_state([saved["state"] for saved in self.state()])

    def load_state(self, state: list[dict[str, Any]]) -> None:
        for index, saved in enumerate(state):
            self.load(index)
            load_optimizer_state(self._optimizer, saved)


def mean_state(states: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Returns one state, by the index of the parameter: the means of tensors, and the maxima of single numbers."""
    indices = {index for state in states for index in state}
    return {index: _mean([state[index] for state in states if index in state]) for index in sorted(indices)}


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
