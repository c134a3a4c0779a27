"""The messages between learners, servers and the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from lightning_pipesync.core.held_weights import HeldWeights
from lightning_pipesync.methods.hyperparameters import Hyperparameters


@dataclass(frozen=True)
class Fetch:
    """A learner that takes local steps got weights: before the pass of a step, or before its local update."""

    step: int
    version: int
    before_pass: bool
    of_shards: tuple[int, ...] = ()  # the versions of all servers' shards, if each server has its own order


@dataclass(frozen=True)
class Accrued:
    """The local steps since a learner's last push: the first one, and the fetches among them."""

    first_step: int
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True)
class Gradient:
    """Identifies the gradient that a learner pushes."""

    rank: int
    step: int  # of this learner, from 1
    version: int  # of the weights that it was computed at
    optimizer: int = 0  # the index of the optimizer
    ahead: float = 0.0  # the number of updates by which those weights were predicted from that version
    accrued: Accrued | None = None  # the local steps that it sums up; None: it is the gradient of one step
    of_shards: tuple[int, ...] = ()  # as of Fetch; ``version`` is then that of the shard of who gets the gradient

    @property
    def num_steps(self) -> int:
        """The number of steps of the learner that it has from."""
        return 1 if self.accrued is None else self.step - self.accrued.first_step + 1


@dataclass(frozen=True)
class Update:
    """An update of the weights by the weighted mean of several gradients."""

    version: int  # of the weights after it, from 1
    gradients: tuple[Gradient, ...]  # of one optimizer, ordered by rank, and by step
    weights: tuple[float, ...]  # of each gradient in the mean; they add up to the number of gradients
    lr_factor: float  # on the learning rate

    @property
    def optimizer(self) -> int:
        return self.gradients[0].optimizer

    @property
    def staleness(self) -> list[int]:
        """For each gradient, the number of updates between the weights that it was computed at and this update."""
        return [self.version - 1 - gradient.version for gradient in self.gradients]


@dataclass(frozen=True)
class UpdateSettings:
    """How a learner wants its gradient to be applied: hyper-parameters by group, and how to clip the mean gradient.

    ``max_norm`` is an L2 norm, ``max_value`` an absolute value; None: no clipping.
    """

    hyperparameters: Hyperparameters
    max_norm: float | None = None
    max_value: float | None = None


@dataclass(frozen=True)
class Decision:
    """What all servers do next; with policies that cancel passes, learners get it, too. They are told of a ``skip``."""

    update: Update | None = None  # made first
    dropped: Gradient | None = None  # no update uses it
    released: tuple[int, ...] = ()  # the learners that then get the weights
    ahead: float = 0.0  # the number of updates by which these weights are predicted
    whole: bool = False  # all ranks have retired, and get the same weights
    skip: bool | None = None  # learners skip a step that they take together; None: it decides something else
    stepping: tuple[int, ...] = ()  # the learners that take that step; some may have retired before it
    settings: UpdateSettings | None = None  # of the update


class Request(Enum):
    """What a learner requests of the coordinator."""

    FETCH = "the newest weights"
    STEP = "a step that all take together: its gradient is finite"
    SKIP = "to skip a step that all take together: its gradient is not finite"
    RETIRE = "the same weights as all, once all learners request them"
    RELOAD = "the same, before the servers read weights and states that were loaded"


@dataclass(frozen=True)
class Push:
    """A learner's gradient for one server."""

    gradient: Gradient
    settings: UpdateSettings | None  # for a coordinator only
    wires: list[Tensor]  # the encoded values of each shard
    present: list[list[bool]]  # which parameters of each shard have a gradient


@dataclass(frozen=True)
class PushArrived:
    """A server has received a gradient, see [Note: incomplete gradients]."""

    gradient: Gradient


@dataclass(frozen=True)
class WeightsMessage:
    """A server's shards of the weights of a version, or predicted from it by ``ahead`` updates.

    ``values``: None if the learner has them.
    """

    version: int
    ahead: float
    values: list[Tensor] | None


@dataclass(frozen=True)
class PartialSums:
    """A server's part of sums over all servers: ``"norm"`` or ``"distances"`` of the update that makes a version."""

    version: int
    kind: str
    part: Tensor


@dataclass(frozen=True)
class BatchRequest:
    """A learner asks for the number of a loader's next batch; the answer is None if there is no more."""

    loader: int
    epoch: int
    num_batches: int
    to_each: bool


@dataclass(frozen=True)
class Flushed:
    """What a rank has when all have retired. The answer is the buffers of the first learner that has sent some."""

    held: HeldWeights  # to be compared
    buffers: list[Tensor | None]  # also parameters that no optimizer has; None: this rank has not changed them


@dataclass(frozen=True)
class StatesRequest:
    """A rank asks a server for its part of an optimizer's state, by parameter name."""

    optimizer: int


@dataclass(frozen=True)
class Answer:
    """The answer to what a rank has asked, by the name of its type."""

    asked: str
    value: Any


@dataclass(frozen=True)
class Refused:
    """The rank that gets this raises a RuntimeError: it counts as lost, or what all ranks have done is refused."""

    message: str
