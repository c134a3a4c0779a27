"""What learners, servers and the coordinator tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from lightning_pipesync.methods.hyperparameters import Hyperparameters


@dataclass(frozen=True)
class Fetch:
    """A learner that takes local steps has taken weights: before the pass of a step, or before its local update."""

    step: int
    version: int
    before_pass: bool


@dataclass(frozen=True)
class Accrued:
    """The local steps since a learner's last push: the first one, and the fetches among them."""

    first_step: int
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True)
class Gradient:
    """Which gradient a learner pushes.

    Attributes:
        rank: the learner.
        step: the number of the learner's step: 1 for the first one.
        version: of the weights that it was computed at.
        optimizer: the index of the optimizer whose parameters have it.
        ahead: by how many updates those weights were predicted from that version.
        accrued: the local steps that it sums up; None: it is the gradient of one step.
    """

    rank: int
    step: int
    version: int
    optimizer: int = 0
    ahead: float = 0.0
    accrued: Accrued | None = None


@dataclass(frozen=True)
class Update:
    """An update of the weights by the weighted mean of several gradients.

    Attributes:
        version: of the weights after it: 1 for the first one.
        gradients: of one optimizer's parameters, ordered by rank, and by step.
        weights: of each gradient in the mean; they add up to the number of gradients.
        lr_factor: factor on the learning rate.
    """

    version: int
    gradients: tuple[Gradient, ...]
    weights: tuple[float, ...]
    lr_factor: float

    @property
    def optimizer(self) -> int:
        """The index of the optimizer."""
        return self.gradients[0].optimizer

    @property
    def staleness(self) -> list[int]:
        """For each gradient, the number of updates between the weights that it was computed at and this update."""
        return [self.version - 1 - gradient.version for gradient in self.gradients]


@dataclass(frozen=True)
class UpdateSettings:
    """What a learner wants of the update that uses its gradient: hyper-parameters, by group, and how to clip the mean.

    ``max_norm`` is an L2 norm, ``max_value`` an absolute value; None: no clipping.
    """

    hyperparameters: Hyperparameters
    max_norm: float | None = None
    max_value: float | None = None


@dataclass(frozen=True)
class Decision:
    """What all servers do next; with policies that cancel passes or skip steps, learners get it, too.

    Attributes:
        update: the update that they make first; None: none.
        dropped: a gradient that no update uses; None: none.
        released: the learners that they then send the weights to.
        ahead: by how many updates they predict these weights.
        whole: whether all ranks get the same weights, which no codec changes.
        skip: whether all learners skip a step that they take together; None: the decision is about something else.
        settings: of the update.
    """

    update: Update | None = None
    dropped: Gradient | None = None
    released: tuple[int, ...] = ()
    ahead: float = 0.0
    whole: bool = False
    skip: bool | None = None
    settings: UpdateSettings | None = None


class Request(Enum):
    """What a learner requests of the coordinator."""

    FETCH = "the newest weights"
    STEP = "a step that all take together: its gradient is finite"
    SKIP = "to skip a step that all take together: its gradient is not finite"
    RETIRE = "the same weights as all, once all learners request them"
    RELOAD = "the same, before the servers read weights and states that were loaded"


@dataclass(frozen=True)
class Push:
    """A learner's gradient, for one server: for each of its shards the encoded values, and which parameters have one.

    Only the coordinator's has the settings for the update.
    """

    gradient: Gradient
    settings: UpdateSettings | None
    wires: list[Tensor]
    present: list[list[bool]]


@dataclass(frozen=True)
class PushArrived:
    """A server tells the coordinator that it has a gradient, see [Note: half a gradient]."""

    gradient: Gradient


@dataclass(frozen=True)
class WeightsMessage:
    """A server's shards of the weights of a version, or predicted from it by ``ahead`` updates.

    ``values`` are the shards, or their encoded differences from those that the learner has; None: it has them.
    """

    version: int
    ahead: float
    are_differences: bool = False
    values: list[Tensor] | None = None


@dataclass(frozen=True)
class PartialSums:
    """A server's part of sums over all servers: ``"norm"`` or ``"distances"`` of the update that makes a version."""

    version: int
    kind: str
    part: Tensor


@dataclass(frozen=True)
class BatchWanted:
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
    """The buffers of a learner that retires next; the coordinator sends all ranks those of the first learner."""

    values: list[Tensor]


@dataclass(frozen=True)
class AgreedBuffers:
    """The buffers that all ranks get once all learners have retired."""

    values: list[Tensor]


@dataclass(frozen=True)
class StatesWanted:
    """A rank asks a server for its part of an optimizer's state."""

    optimizer: int


@dataclass(frozen=True)
class States:
    """A server's part of an optimizer's state, by the name of a parameter."""

    values: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Evicted:
    """The rank that gets this counts as lost; the others train without it."""


@dataclass(frozen=True)
class Refused:
    """All ranks raise a RuntimeError with this message."""

    message: str
