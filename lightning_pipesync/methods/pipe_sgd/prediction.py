"""The weights for which a gradient is computed, so that it fits when it is applied some updates later.

[Note: undoing the delay]
A gradient that is applied k updates after the weights that it was computed at has them moved in the meantime. Most of
that move is known: the updates on their way are made of the optimizer's state and of gradients of which this rank has
its own part. So the optimizer takes trial steps with these on copies, and forward and backward pass run there. The
averages do the real updates, of the true weights, which are the same on all ranks; the predicted ones are not.
SpecTrain (Chen et al., Section 3.2) predicts from momentum alone, that is, with gradients of zero. "Eager updates"
(Kale et al., arXiv 2502.12996) put a rank's own part in the place of the average, as here, but for DiLoCo's exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.compat import foreach_copy_, twin_optimizer
from lightning_pipesync.core.buckets import MIB, Bucket
from lightning_pipesync.methods.hyperparameters import Hyperparameters

#: MiB of weights that take their trial step together: with their copies they stay in a processor's cache.
BLOCK_MB = 1.0


@dataclass(frozen=True)
class TrialStep:
    """What an optimizer's trial step is made with.

    Attributes:
        gradients: by the id of their parameter, the others stay as they are; None: zeros for all.
        hyperparameters: learning rate and so on, by parameter group.
    """

    gradients: Mapping[int, Tensor] | None
    hyperparameters: Hyperparameters

    def gradient_for(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient of a parameter, of which the optimizer may make what it likes."""
        if self.gradients is None:
            return torch.zeros_like(parameter)
        gradient = self.gradients.get(id(parameter))
        return None if gradient is None else gradient.clone()


class PredictedWeights:
    """What the weights of one optimizer will be, in the place of the true ones while a gradient is computed.

    The parameters' data are exchanged, not copied. The optimizer's state and its hooks are left alone.

    Attributes:
        in_use: whether the parameters are the predicted weights.

    Args:
        optimizer: one of ``torch.optim`` takes its trial steps block by block, any other one, which may look at several
            parameters, as a whole.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._views: dict[int, Tensor] = {}  # by the id of the parameter
        self._parameters: list[Tensor] = []
        self._true: list[Tensor] = []
        self._known = False
        self.in_use = False

    def forget(self) -> None:
        """Has the next :meth:`use` predict anew, from the true weights, with which the parameters go on."""
        self.put_back()
        self._known = False

    def use(self, steps: Sequence[TrialStep]) -> None:
        """Has the parameters be what the true weights are after ``steps``.

        Args:
            steps: looked at only by the first call since :meth:`forget`.

        Raises:
            RuntimeError: the optimizer cannot step copies of its parameters.
        """
        if self.in_use or not steps:
            return
        if not self._known:
            self._allocate()
            for block in self._blocks():
                self._predict(block, steps)
            self._known = True
        self._true = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = self._views[id(parameter)]
        self.in_use = True

    def put_back(self) -> None:
        """Has the parameters be the true weights."""
        if self.in_use:
            for parameter, data in zip(self._parameters, self._true, strict=True):
                parameter.data = data
            self._true = []
            self.in_use = False

    def _allocate(self) -> None:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if [id(parameter) for parameter in parameters] == [id(parameter) for parameter in self._parameters]:
            return
        self._parameters, self._views = parameters, {}
        for _, members in groupby(sorted(parameters, key=_kind), key=_kind):
            of_kind = list(members)
            self._views |= dict(zip(map(id, of_kind), Bucket(of_kind, strided=True).views, strict=True))

    def _blocks(self) -> list[dict[int, list[Tensor]]]:
        """Returns what takes its trial steps together: parameters, by the index of their group."""
        groups = {index: group["params"] for index, group in enumerate(self._optimizer.param_groups)}
        if not type(self._optimizer).__module__.startswith("torch.optim."):
            return [groups]
        blocks: list[dict[int, list[Tensor]]] = []
        for index, parameters in groups.items():
            room = 0.0
            for parameter in parameters:
                size = parameter.numel() * parameter.element_size() / MIB
                if size > room:
                    blocks.append({index: []})
                    room = BLOCK_MB
                blocks[-1][index].append(parameter)
                room -= size
        return blocks

    @torch.no_grad()
    def _predict(self, block: dict[int, list[Tensor]], steps: Sequence[TrialStep]) -> None:
        parameters = [parameter for of_group in block.values() for parameter in of_group]
        views = [self._views[id(parameter)] for parameter in parameters]
        foreach_copy_(views, parameters)
        state = {
            view: {name: _copied(value) for name, value in self._optimizer.state[parameter].items()}
            for parameter, view in zip(parameters, views, strict=True)
            if parameter in self._optimizer.state
        }
        groups = {
            index: {**self._optimizer.param_groups[index], "params": [self._views[id(p)] for p in of_group]}
            for index, of_group in block.items()
        }
        twin = twin_optimizer(self._optimizer, list(groups.values()), state)
        for step in steps:
            for index, group in groups.items():
                if index < len(step.hyperparameters):  # otherwise it has joined since
                    group.update({name: _copied(value) for name, value in step.hyperparameters[index].items()})
            for parameter, view in zip(parameters, views, strict=True):
                view.grad = step.gradient_for(parameter)
            try:
                twin.step()
            except (AttributeError, KeyError, TypeError) as error:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} cannot step copies of its parameters, by which Pipe-SGD "
                    "predicts the weights: set delay_compensation='none'."
                ) from error
        for view in views:
            view.grad = None


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.dtype), str(tensor.device)


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)
