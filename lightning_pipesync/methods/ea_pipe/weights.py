"""The weights of a stage: the version that a mini-batch uses and its update, for each algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.schedule import Schedule
from lightning_pipesync.methods.ea_pipe.torch_private import hidden_from_autograd
from lightning_pipesync.methods.ea_pipe.versions import OptimizerStates, Versions


class StageWeights(ABC):
    """The parameters and buffers of one stage, in the versions that an algorithm needs; the last is the master."""

    #: Whether buffers (such as BatchNorm's averages) have versions, too; if not, all mini-batches share them.
    replicates_buffers = False

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        optimizer: Optimizer,
        schedule: Schedule,
        config: EAPipeConfig,
    ) -> None:
        self._parameters, self._schedule, self._config = parameters, schedule, config
        self._buffers = buffers if self.replicates_buffers else []
        self._master = self.num_copies
        self._versions = Versions([*self._parameters, *self._buffers], self.num_copies + 1)
        self._states = OptimizerStates(optimizer, self._parameters, self.num_states)

    @property
    @abstractmethod
    def num_copies(self) -> int:
        """The number of versions of the weights besides the master."""

    @property
    def num_states(self) -> int:
        """The number of states of the optimizer."""
        return 1

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
        self._versions.load_master(self._parameters)

    def leave_master(self) -> bool:
        """Resets every replica to the master if it was written to since :meth:`load_master`; returns whether it was."""
        written = self._versions.written()
        if written:
            self._versions.reset()
        return written

    def master_parameters(self) -> list[Tensor]:
        return self._versions.views(self._master)[: len(self._parameters)]

    def master_buffers(self) -> list[Tensor]:
        """Returns the master's buffers, if they have versions."""
        return self._versions.views(self._master)[len(self._parameters) :]

    def reset(self) -> None:
        """Resets all versions and states to the current ones of the parameters and the optimizer."""
        self._versions.reset()
        self._states.reset()

    def computing(self) -> AbstractContextManager[None]:
        """Context in which the layers may write to replicated buffers, hidden from autograd."""
        return hidden_from_autograd(self._buffers)

    def state_dict(self) -> dict[str, Any]:
        return {"versions": self._versions.state(), "optimizer": self._states.state()}

    def optimizer_state(self) -> dict[int, Any]:
        """Returns the mean state over the replicas, by the index of the parameter."""
        return self._states.mean()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._versions.load_state(state["versions"])
        self._states.load_state(state["optimizer"])


class ElasticReplicas(StageWeights):
    """EA-Pipe: each mini-batch in flight updates its own replica, which is then pulled (Algorithm 1)."""

    replicates_buffers = True

    @property
    def num_copies(self) -> int:
        return self._schedule.num_replicas

    @property
    def num_states(self) -> int:
        return self._schedule.num_replicas

    def for_forward(self, step: int) -> None:
        self._versions.load(self._schedule.replica(step))

    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        replica = self._schedule.replica(step)
        self._states.load(replica)
        optimizer_step()
        if self._schedule.is_due(step, self._config.period):
            self._versions.pull(replica, self._master, self._config.elastic_force)  # Eq. 1


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
        self._versions.load(step % self.num_copies)

    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        self._versions.load(self._master)
        optimizer_step()
        self._versions.copy(self._master, step % self.num_copies)


class SynchronizedStashedWeights(StashedWeights):
    """PipeDream with vertical sync: all stages use copies as old as those of the first stage (paper, Fig. 1b)."""

    @property
    def num_copies(self) -> int:
        return self._schedule.num_replicas


class SharedWeights(StageWeights):
    """One version, which all passes use: naive pipelining (Fig. 1a) and synchronous pipelines."""

    num_copies = 0

    def for_forward(self, step: int) -> None:
        self._versions.load(self._master)

    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        optimizer_step()


class SpecTrainWeights(StageWeights):
    """SpecTrain: both passes of a mini-batch use a prediction of the weights at the end of its backward pass.

    Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform", Section
    3.2: the weights s updates ahead are the current ones plus s times a smoothed update.
    """

    num_copies = 1

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], optimizer: Optimizer, *rest: Any):
        super().__init__(parameters, buffers, optimizer, *rest)
        smoothing = self._config.prediction_smoothing
        self._smoothing = (0.0 if _has_momentum(optimizer) else 0.9) if smoothing is None else smoothing
        self._velocity = [torch.zeros_like(flat) for flat in self._versions.floating(self._master)]
        self._before = [torch.empty_like(flat) for flat in self._velocity]

    def for_forward(self, step: int) -> None:
        self._predict(self._schedule.lag + self._schedule.versions_after)

    def for_backward(self, step: int) -> None:
        self._predict(self._schedule.versions_after)

    @torch.no_grad()
    def _update(self, step: int, optimizer_step: Callable[[], object]) -> None:
        master = self._versions.floating(self._master)
        for before, now in zip(self._before, master, strict=True):
            before.copy_(now)
        self._versions.load(self._master)
        optimizer_step()
        for velocity, before, now in zip(self._velocity, self._before, master, strict=True):
            velocity.lerp_(torch.sub(now, before, out=before), 1 - self._smoothing)

    @torch.no_grad()
    def _predict(self, ahead: int) -> None:
        """Loads a prediction of the weights in ``ahead`` updates, always in the same memory, which graphs refer to."""
        self._versions.copy(self._master, 0)
        for predicted, velocity in zip(self._versions.floating(0), self._velocity, strict=True):
            predicted.add_(velocity, alpha=ahead)
        self._versions.load(0)

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


def _has_momentum(optimizer: Optimizer) -> bool:
    return any(group.get("momentum") or group.get("betas") for group in optimizer.param_groups)
