"""The messages between learners, servers and the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

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
    """What all servers do next; with policies that cancel passes, learners get it, too; a ``skip`` only learners."""

    update: Update | None = None  # made first
    dropped: Gradient | None = None  # no update uses it
    released: tuple[int, ...] = ()  # the learners that then get the weights
    ahead: float = 0.0  # the number of updates by which these weights are predicted
    whole: bool = False  # all ranks get the same weights, which no codec changes
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
    """A learner asks for a loader's next batch; ``num_resumed`` is how many times it has resumed from a saved state."""

    loader: int
    epoch: int
    num_batches: int
    to_each: bool
    num_resumed: int


@dataclass(frozen=True)
class Batch:
    """The number of the batch that was asked for; None: there is no more."""

    number: int | None


@dataclass(frozen=True)
class LearnerBuffers:
    """What a learner sends before it retires: parameters that no optimizer has (None: unchanged), and buffers."""

    values: list[Tensor | None]


@dataclass(frozen=True)
class FlushedBuffers:
    """The first learner's buffers, which all ranks get once all learners have retired, see :class:`LearnerBuffers`."""

    values: list[Tensor | None]


@dataclass(frozen=True)
class SameWeights:
    """All ranks hold the same weights, by what each has told the coordinator at a flush."""


@dataclass(frozen=True)
class StatesRequest:
    """A rank asks a server for its part of an optimizer's state."""

    optimizer: int


@dataclass(frozen=True)
class States:
    """A server's part of an optimizer's state, by parameter name."""

    values: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Evicted:
    """The rank that gets this counts as lost; the others train without it."""


@dataclass(frozen=True)
class Refused:
    """All ranks raise a RuntimeError with this message."""

    message: str
