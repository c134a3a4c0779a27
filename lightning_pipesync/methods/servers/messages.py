"""What learners, servers and the coordinator tell each other, besides tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.optim import Optimizer

from lightning_pipesync.core.plain import encode
from lightning_pipesync.methods.gradients.hyperparameters import Hyperparameters, current
from lightning_pipesync.methods.servers.policies import Gradient


class Request(Enum):
    """What a learner wants of the coordinator."""

    FETCH = "weights"
    STEP = "a step, which all take together"
    SKIP = "no step, as its gradient is not finite"
    RETIRE = "the same weights as all, once all want them"


@dataclass(frozen=True)
class UpdateSettings:
    """What a learner's step asks for.

    Attributes:
        hyperparameters: of the optimizer's parameter groups.
        max_norm: the L2 norm to which the mean gradient is clipped; None: it is not.
        max_value: what its values are clipped to; None: they are not.
    """

    hyperparameters: Hyperparameters
    max_norm: float | None = None
    max_value: float | None = None


@dataclass(frozen=True)
class Push:
    """A learner's gradient for one server; what goes to the coordinator has the settings of its step, too."""

    gradient: Gradient
    settings: UpdateSettings | None


@dataclass(frozen=True)
class WeightsMessage:
    """A server's shards of the weights: of a version, or predicted from it by so many updates.

    They are sent as they are, or as encoded differences to those that the learner has.
    """

    version: int
    ahead: float
    are_differences: bool = False


@dataclass(frozen=True)
class Sums:
    """What sums over all servers are for: the update that makes a version, and its ``norm`` or ``distances``."""

    version: int
    kind: str


@dataclass(frozen=True)
class Ask:
    """A learner asks for a loader's next batch of an epoch with so many, of which each rank may have to get one.

    It has resumed so many times from a saved state, and is answered when the coordinator has, too.
    """

    loader: int
    epoch: int
    num_batches: int
    to_each: bool
    num_resumed: int


@dataclass(frozen=True)
class Batch:
    """The number of a batch that is handed out; None: there is no more."""

    number: int | None


@dataclass(frozen=True)
class Arrived:
    """A server has a learner's gradient."""

    gradient: Gradient


@dataclass(frozen=True)
class OwnBuffers:
    """A learner's buffers, before it retires."""


@dataclass(frozen=True)
class Buffers:
    """The first learner's buffers, when all have retired."""


@dataclass(frozen=True)
class StatesWanted:
    """A rank asks a server for its part of an optimizer's state."""

    optimizer: int


@dataclass(frozen=True)
class States:
    """A server's part of an optimizer's state, as it was when all learners retired last."""


@dataclass(frozen=True)
class Evicted:
    """The others go on without the learner that gets this."""


def check_hyperparameters(optimizer: Optimizer) -> None:
    """Checks that the hyper-parameters of an optimizer can be sent to the servers with each gradient.

    Raises:
        ValueError: one is no plain value; the message names it.
    """
    for index, group in enumerate(current(optimizer)):
        for name, value in group.items():
            try:
                encode(value, lambda tensor: 0)
            except TypeError as error:
                raise ValueError(
                    f"{name} of group {index} of {type(optimizer).__name__} is {value!r}, and cannot be sent to the "
                    f"servers: {error} Use another method, or a number, a text or a tensor in its place."
                ) from None
