"""The weights of a stage: the version that a mini-batch uses and its update, for each algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.fingerprints import versions_of, written_since
from lightning_pipesync.core.parameters import load_optimizer_state
from lightning_pipesync.core.torch_private import foreach_zero_
from lightning_pipesync.methods.ea_pipe.channels import Schedule
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.torch_private import hidden_from_autograd

#: The state of an optimizer, such as momentum, by parameter.
State = dict[Any, Any]


class StageWeights(ABC):
    """The parameters and buffers of one stage, in the versions that an algorithm needs; the last one is the master.

    Each version is in one flat buffer per dtype. One is loaded: the tensors' data is swapped instead of copied, since
    the backward pass of a graph needs the version of its forward pass. All start with the tensors' current values.

    The user's optimizer steps, so that its hooks run and learning rate schedulers apply to all versions. It may have
    several states, of which one is loaded. The state of parameters of other stages is dropped.
    """

    #: Whether each version but the master is a replica, with buffers (such as BatchNorm's averages) and a state of the
    #: optimizer of its own; if not, all mini-batches share them.
    has_replicas = False

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        optimizer: Optimizer,
        schedule: Schedule,
        config: EAPipeConfig,
    ) -> None:
        self._parameters, self._buffers = parameters, buffers if self.has_replicas else []
        self._optimizer, self._schedule, self._config = optimizer, schedule, config
        self._master = self.num_copies
        self._tensors = [*self._parameters, *self._buffers]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(self._tensors):
            by_dtype.setdefault(tensor.dtype, []).append(i)
        self._flats: list[list[Tensor]] = []
        self._views: list[list[Tensor]] = []
        for _ in range(self.num_copies + 1):
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
        self._load(0)
        self._reset_states()

    @property
    @abstractmethod
    def num_copies(self) -> int:
        """The number of versions of the weights besides the master."""

    @abstractmethod
    def for_forward(self, step: int) -> None:
        """Loads the weights for the forward pass of mini-batch ``step``."""

    def for_backward(self, step: int) -> None:
        """Loads the weights for the backward pass of mini-batch ``step``; in most algorithms the same."""
        self.for_forward(step)

    def update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        """Applies the gradient of mini-batch ``step``, which the parameters hold.

        Hidden from autograd: graphs that wait for their backward pass use other versions of the weights, or this one on
        purpose.
        """
        with hidden_from_autograd(self._parameters):
            self._update(step, optimizer_step)

    @abstractmethod
    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None: ...

    def load_master(self) -> None:
        """Loads the master, which others may read and write until :meth:`leave_master`."""
        self._load(self._master)
        self._marks = versions_of(self._parameters)

    def leave_master(self) -> bool:
        """Resets every version to the master if it was written to since :meth:`load_master`; returns whether it was."""
        written = bool(written_since(self._marks, self._parameters))
        if written:
            self._reset_versions()
        return written

    def master_parameters(self) -> list[Tensor]:
        return self._views[self._master][: len(self._parameters)]

    def master_buffers(self) -> list[Tensor]:
        """Returns the master's buffers, if they have versions."""
        return self._views[self._master][len(self._parameters) :]

    def reset(self) -> None:
        """Resets all versions and states to the current ones of the parameters and the optimizer."""
        self._reset_versions()
        self._reset_states()

    def computing(self) -> AbstractContextManager[None]:
        """Context in which the layers may write to replicated buffers, hidden from autograd."""
        return hidden_from_autograd(self._buffers)

    def state_dict(self) -> dict[str, Any]:
        versions = [[flat.cpu().clone() for flat in flats] for flats in self._flats]
        return {"versions": versions, "optimizer": self._saved_states()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for flats, saved in zip(self._flats, state["versions"], strict=True):
            for flat, values in zip(flats, saved, strict=True):
                flat.copy_(values)
        for index, of_optimizer in enumerate(state["optimizer"]):
            self._load_optimizer_state(index)
            load_optimizer_state(self._optimizer, of_optimizer)

    def optimizer_state(self) -> dict[int, Any]:
        """Returns the :func:`mean_state` of the optimizer's states."""
        return mean_state([saved["state"] for saved in self._saved_states()])

    def _load(self, index: int) -> None:
        for tensor, view in zip(self._tensors, self._views[index], strict=True):
            tensor.data = view

    def _floating(self, index: int) -> list[Tensor]:
        return [flat for flat in self._flats[index] if flat.is_floating_point()]

    @torch.no_grad()
    def _copy(self, source: int, target: int) -> None:
        for copied, flat in zip(self._flats[target], self._flats[source], strict=True):
            copied.copy_(flat)

    @torch.no_grad()
    def _reset_versions(self) -> None:
        """Sets all versions to the current values of the tensors, which have the master loaded."""
        for tensor, view in zip(self._tensors, self._views[self._master], strict=True):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        self._load(self._master)
        for index in range(self._master):
            self._copy(self._master, index)

    def _reset_states(self) -> None:
        """Sets all states of the optimizer to its current one."""
        current = self._optimizer.state
        held = [parameter for parameter in self._parameters if parameter in current]
        count = self.num_copies if self.has_replicas else 1
        self._states: list[State] = [{p: deepcopy(dict(current[p])) for p in held} for _ in range(count)]
        self._put_optimizer_state(0)

    def _load_optimizer_state(self, index: int) -> None:
        """Loads state ``index`` into the optimizer, after storing the one that was loaded."""
        self._states[self._loaded_state] = dict(self._optimizer.state)
        self._put_optimizer_state(index)

    def _put_optimizer_state(self, index: int) -> None:
        self._loaded_state = index
        self._optimizer.state.clear()
        self._optimizer.state.update(self._states[index])

    def _saved_states(self) -> list[dict[str, Any]]:
        """Returns copies of the optimizer's states in the form of ``Optimizer.state_dict``."""
        found = []
        for index in range(len(self._states)):
            self._load_optimizer_state(index)
            found.append(deepcopy(self._optimizer.state_dict()))
        return found


class ElasticReplicas(StageWeights):
    """EA-Pipe: each mini-batch in flight updates its own replica, which is then pulled (Algorithm 1)."""

    has_replicas = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._forces = [torch.empty_like(flat) for flat in self._flats[0]]

    @property
    def num_copies(self) -> int:
        return self._schedule.num_replicas

    def for_forward(self, step: int) -> None:
        self._load(self._schedule.replica(step))

    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        replica = self._schedule.replica(step)
        self._load_optimizer_state(replica)
        optimizer_step()
        if self._schedule.is_due(step, self._config.period):
            self._pull(replica)

    @torch.no_grad()
    def _pull(self, index: int) -> None:
        """Pulls a replica and the master together (Eq. 1). The master takes the replica's integers."""
        for replica, center, force in zip(self._flats[index], self._flats[self._master], self._forces, strict=True):
            if replica.is_floating_point():
                torch.sub(replica, center, out=force).mul_(self._config.elastic_force)
                replica.sub_(force)
                center.add_(force)
            else:
                center.copy_(replica)


class StashedWeights(StageWeights):
    """PipeDream's weight stashing: each stage keeps a copy of its newest weights for both passes of a mini-batch.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, Section 3.3: a gradient
    updates the newest weights, the master. The next forward pass reuses the copy of that mini-batch, with the weights
    after its update: they are ``lag`` updates old at their backward pass, fewer from stage to stage.
    """

    @property
    def num_copies(self) -> int:
        return self._schedule.lag + 1

    def for_forward(self, step: int) -> None:
        self._load(step % self.num_copies)

    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        self._load(self._master)
        optimizer_step()
        self._copy(self._master, step % self.num_copies)


class SynchronizedStashedWeights(StashedWeights):
    """PipeDream with vertical sync: all stages use copies as old as those of the first stage (paper, Fig. 1b)."""

    @property
    def num_copies(self) -> int:
        return self._schedule.num_replicas


class SharedWeights(StageWeights):
    """One version, which all passes use: naive pipelining (Fig. 1a) and synchronous pipelines."""

    num_copies = 0

    def for_forward(self, step: int) -> None:
        self._load(self._master)

    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        optimizer_step()


class SpecTrainWeights(StageWeights):
    """SpecTrain: both passes of a mini-batch use a prediction of the weights at the end of its backward pass.

    Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform", Section
    3.2: the weights s updates ahead are the current ones plus s times a smoothed update.
    """

    num_copies = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        smoothing = self._config.prediction_smoothing
        has_momentum = any(group.get("momentum") or group.get("betas") for group in self._optimizer.param_groups)
        self._smoothing = (0.0 if has_momentum else 0.9) if smoothing is None else smoothing
        self._velocity = [torch.zeros_like(flat) for flat in self._floating(self._master)]
        self._before = [torch.empty_like(flat) for flat in self._velocity]

    def for_forward(self, step: int) -> None:
        self._predict(self._schedule.lag + self._schedule.versions_after)

    def for_backward(self, step: int) -> None:
        self._predict(self._schedule.versions_after)

    @torch.no_grad()
    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        master = self._floating(self._master)
        for before, now in zip(self._before, master, strict=True):
            before.copy_(now)
        self._load(self._master)
        optimizer_step()
        for velocity, before, now in zip(self._velocity, self._before, master, strict=True):
            velocity.lerp_(torch.sub(now, before, out=before), 1 - self._smoothing)

    def reset(self) -> None:
        super().reset()
        foreach_zero_(self._velocity)

    @torch.no_grad()
    def _predict(self, ahead: int) -> None:
        """Loads a prediction of the weights in ``ahead`` updates, always in the same memory, which graphs refer to."""
        self._copy(self._master, 0)
        for predicted, velocity in zip(self._floating(0), self._velocity, strict=True):
            predicted.add_(velocity, alpha=ahead)
        self._load(0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "velocity": [flat.cpu().clone() for flat in self._velocity]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for flat, values in zip(self._velocity, state["velocity"], strict=True):
            flat.copy_(values)


#: The class of each algorithm.
WEIGHTS: dict[str, type[StageWeights]] = {
    "ea_pipe": ElasticReplicas,
    "pipedream": SynchronizedStashedWeights,
    "weight_stashing": StashedWeights,
    "naive": SharedWeights,
    "gpipe": SharedWeights,
    "1f1b": SharedWeights,
    "spectrain": SpecTrainWeights,
}


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
