"""Weight prediction: a gradient is computed at the weights that it will update.

[Note: undoing the delay]
A gradient updates weights that have moved by k updates since it was computed. Most of that move is known: the updates
in flight depend on the optimizer's state and on gradients of which this rank has its own part. So the optimizer takes
trial steps with these on copies of the weights, and forward and backward pass run at the copies. The averages update
the true weights, which are the same on all ranks; the predicted ones are not.
SpecTrain (Chen et al., Section 3.2) predicts from momentum alone, that is, with gradients of zero. "Eager updates"
(Kale et al., arXiv 2502.12996) use a rank's own part for the average, as here, but in DiLoCo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import MIB, Bucket
from lightning_pipesync.core.dtensors import LocalShard, give_values
from lightning_pipesync.core.fingerprints import Version, versions_of, written_since
from lightning_pipesync.core.torch_private import Probe, foreach_copy_, twin_optimizer
from lightning_pipesync.methods.hyperparameters import Hyperparameters, copied, current

#: MiB of weights of a trial step: enough to keep an accelerator busy, and on a CPU so few that weights and copies stay
#: in its cache.
BLOCK_MB, BLOCK_MB_ON_CPU = 64.0, 1.0


@cache
def _common_attributes() -> frozenset[str]:
    """Returns the attributes that every optimizer has."""
    return frozenset(vars(Probe([torch.zeros(1)])))


@dataclass(frozen=True)
class TrialStep:
    """Gradients, by the id of their parameter (None for zeros), and hyper-parameters of a trial step.

    Other parameters are not updated.
    """

    gradients: Mapping[int, Tensor | None]
    hyperparameters: Hyperparameters

    def gradient_for(self, parameter: Tensor) -> Tensor | None:
        """Returns a copy of the gradient, since optimizers may change it."""
        if id(parameter) not in self.gradients:
            return None
        gradient = self.gradients[id(parameter)]
        return torch.zeros_like(parameter) if gradient is None else gradient.clone()


class PredictedWeights:
    """The predicted weights of one optimizer, swapped in for the true ones while a gradient is computed.

    A swap exchanges the data of parameters, without a copy unless FSDP2 has sharded them, and only of parameters that
    a trial step updates.
    An optimizer of ``torch.optim`` takes its trial steps block by block. Any other one takes them as a whole, since it
    may use several parameters at once. ``trial_steps`` returns the steps that are expected; none: nothing is predicted.
    """

    def __init__(self, optimizer: Optimizer, trial_steps: Callable[[], Sequence[TrialStep]]) -> None:
        self._optimizer, self._trial_steps = optimizer, trial_steps
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a parameter: the parameter, the prediction
        self._moved: list[Tensor] = []
        self._true: list[Tensor] = []  # their data
        self._marks: list[Version] = []  # their versions, once the prediction is swapped in
        self._known = False
        self.in_use = False  # whether the parameters hold the predicted weights
        self.names: dict[int, str] = {}  # of parameters, by id

    def forget(self) -> None:
        """Restores the true weights, and drops the prediction: the next :meth:`use` predicts again."""
        self.restore()
        self._known = False

    def use(self) -> None:
        """Swaps in the weights after the expected steps, those of the first call after :meth:`forget`."""
        if self.in_use or not (steps := self._trial_steps()):
            return
        if not self._known:
            moved = set().union(*(step.gradients for step in steps))
            self._moved = [p for group in self._optimizer.param_groups for p in group["params"] if id(p) in moved]
            self._allocate()
            # Trial steps get copies, since an optimizer may change its hyper-parameters.
            first, copies = current(self._optimizer), [copied(step.hyperparameters) for step in steps]
            for block in self._blocks():
                self._predict(block, first, list(zip(steps, copies, strict=True)))
            self._known = True
        # A shard of FSDP2's keeps its memory, and is copied.
        self._true = [p.detach().clone() if isinstance(p, LocalShard) else p.data for p in self._moved]
        self.in_use = True  # first, so that an interrupt after it restores the weights
        for parameter in self._moved:
            give_values(parameter, self._views[id(parameter)][1])
        self._marks = versions_of(self._moved)

    def restore(self, check: bool = True) -> None:
        """Swaps the true weights back in.

        Raises:
            RuntimeError: with ``check``, something was written to the predicted weights, which would be lost.
        """
        if not self.in_use:
            return
        found = [self._moved[index] for index in written_since(self._marks, self._moved)]  # no marks after an interrupt
        written = [self.names.get(id(parameter), "a parameter") for parameter in found]
        for parameter, values in zip(self._moved, self._true, strict=True):
            give_values(parameter, values)
        self._true, self._marks, self.in_use = [], [], False
        if written and check:
            raise RuntimeError(
                f"{', '.join(written[:3])} was written to between a forward pass and the step, where the weights are "
                "those that Pipe-SGD predicts: that would be lost. Write within `with sync.true_weights():` (in a "
                "LightningModule: self.trainer.strategy.method.true_weights()), or set delay_compensation='none'."
            )

    def _allocate(self) -> None:
        missing = sorted((p for p in self._moved if id(p) not in self._views), key=_kind)
        for _, members in groupby(missing, key=_kind):
            parameters = list(members)
            views = Bucket(parameters).views
            self._views |= {id(p): (p, view) for p, view in zip(parameters, views, strict=True)}

    def _blocks(self) -> Iterable[dict[int, list[Tensor]]]:
        """Yields the parameters of each trial step's blocks, by the index of their group."""
        moved = {id(parameter) for parameter in self._moved}
        groups = {
            index: [parameter for parameter in group["params"] if id(parameter) in moved]
            for index, group in enumerate(self._optimizer.param_groups)
        }
        if not self._is_torchs_own:
            yield groups
            return
        for index, parameters in groups.items():
            before = accumulate((parameter.nbytes / MIB for parameter in parameters), initial=0.0)
            sizes = [BLOCK_MB if parameter.is_cuda else BLOCK_MB_ON_CPU for parameter in parameters]
            numbers = [mib // size for mib, size in zip(before, sizes, strict=False)]  # of the block where it begins
            for _, block in groupby(zip(numbers, parameters, strict=True), key=lambda pair: pair[0]):
                yield {index: [parameter for _, parameter in block]}

    @torch.no_grad()
    def _predict(
        self,
        block: dict[int, list[Tensor]],
        first: Hyperparameters,
        steps: Sequence[tuple[TrialStep, Hyperparameters]],
    ) -> None:
        parameters = [parameter for of_group in block.values() for parameter in of_group]
        views = {id(parameter): self._views[id(parameter)][1] for parameter in parameters}
        foreach_copy_(list(views.values()), parameters)
        try:
            twin = self._twin(block, views, first)
            before: list[dict[str, Any]] = [{} for _ in self._optimizer.param_groups]
            for step, copy in steps:
                for index, group in zip(block, twin.param_groups, strict=True):
                    if index < len(step.hyperparameters):  # otherwise the group was added since
                        now = step.hyperparameters[index]
                        # Values that the optimizer itself has changed in the previous trial step stay.
                        group.update({n: copy[index][n] for n, v in now.items() if not _same(v, before[index].get(n))})
                        before[index] = now
                for parameter in parameters:
                    views[id(parameter)].grad = step.gradient_for(parameter)
                twin.step()
        except (AttributeError, KeyError, TypeError) as error:
            raise RuntimeError(
                f"{type(self._optimizer).__name__} failed to step copies of its parameters, by which Pipe-SGD predicts "
                "the weights. If it cannot do that, set delay_compensation='none'."
            ) from error
        for view in views.values():
            view.grad = None

    def _twin(
        self, block: dict[int, list[Tensor]], views: Mapping[int, Tensor], hyperparameters: Hyperparameters
    ) -> Optimizer:
        """Returns an optimizer over the predicted weights that shares no tensor with the user's."""
        state = {
            views[id(parameter)]: {
                name: value.clone() if isinstance(value, Tensor) else deepcopy(value)
                for name, value in self._optimizer.state[parameter].items()
            }
            for of_group in block.values()
            for parameter in of_group
            if parameter in self._optimizer.state
        }
        groups = [
            {**hyperparameters[index], "params": [views[id(parameter)] for parameter in of_group]}
            for index, of_group in block.items()
        ]
        twin = twin_optimizer(self._optimizer, groups, state)
        if not self._is_torchs_own:
            memo: dict[int, Any] = dict(views)  # it may refer to its parameters
            common = {*_common_attributes(), "step"}
            attributes = {name: value for name, value in vars(self._optimizer).items() if name not in common}
            vars(twin).update(deepcopy(attributes, memo))
        return twin

    @property
    def _is_torchs_own(self) -> bool:
        return type(self._optimizer).__module__.startswith("torch.optim.")


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.dtype), str(tensor.device)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)
