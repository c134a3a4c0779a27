"""Base class of all methods, and what their metrics are."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.faults.errors import is_normal_end
from lightning_pipesync.core.faults.shutdown import AFTER_ERROR_S
from lightning_pipesync.methods.settings import Settings


@dataclass(frozen=True)
class MetricInfo:
    """What a metric is, beside the method that returns it: the table on the method's page is made of it.

    Args:
        meaning: what it counts or measures, in a few words.
        unit: that of its values; empty for numbers and shares.
        over_ranks: what :meth:`reduce` returns of the ranks' values. ``"same"``: that of all ranks; ``"rank 0"``: that
            of rank 0, as others have none; ``"mean"`` or ``"max"``.
    """

    meaning: str = ""
    unit: str = ""
    over_ranks: Literal["same", "rank 0", "mean", "max"] = "mean"

    @property
    def differs(self) -> bool:
        """Whether ranks may have different values."""
        return self.over_ranks in ("mean", "max")

    def reduce(self, values: Sequence[float]) -> float:
        """Returns one value for all ranks, from the values of those that have one."""
        if not self.differs:
            return values[0]
        return max(values) if self.over_ranks == "max" else fmean(values)


#: Metrics of all methods.
NETWORK_METRICS = MappingProxyType(
    {
        "mib_sent": MetricInfo("payload that a rank has sent in steps so far", "MiB", "max"),
        "mib_beside_steps": MetricInfo("payload that a rank has sent besides", "MiB", "max"),
        "exposed_seconds": MetricInfo("time that training has waited for communication so far", "s"),
    }
)


def network_metrics(traffic: Traffic) -> dict[str, float]:
    """Returns the metrics of all methods, of this rank."""
    return {
        "mib_sent": traffic.total_bytes_sent / MIB,
        "mib_beside_steps": traffic.bytes_beside / MIB,
        "exposed_seconds": traffic.total_seconds_waited,
    }


def counted(number: float, noun: str) -> str:
    """Returns a number of things, in words: ``"1 step"``, ``"2000000 steps"``."""
    return f"{number:.0f} {noun}" if number == 1 else f"{number:.0f} {noun}s"


#: MiB in one message when weights and buffers are broadcast.
PIECE_MB = 25.0


class Method(ABC):
    """Base of every registered method."""

    name: ClassVar[str]  #: under which it is registered
    config_type: ClassVar[type[Settings]]  #: the dataclass of its settings
    makes_passes: ClassVar[bool] = False  #: whether it makes the forward and backward passes itself, as a pipeline does
    metric_infos: ClassVar[Mapping[str, MetricInfo]] = NETWORK_METRICS  #: of its metrics, by name
    #: Short names of the metrics that a progress bar shows, of two at most.
    shown_metrics: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"mib_sent": "sent_MiB", "exposed_seconds": "waited_s"}
    )
    shards_optimizer_state: ClassVar[bool] = False  #: whether a rank may have only a part of an optimizer's state

    transport: Transport | None  #: None if there are no other ranks
    flushed: bool  #: whether the weights are the consolidated ones, since flush()

    @abstractmethod
    def flush(self) -> None:
        """Makes the module's weights the method's consolidated ones, the same on all ranks; a collective call.

        A step without a ``resume`` before it continues from them.
        """

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns this rank's metrics since the start of the training, by name."""

    @classmethod
    def metric_info(cls, name: str) -> MetricInfo:
        """Returns what a metric is; one that is not declared in ``metric_infos`` is averaged over the ranks."""
        return cls.metric_infos.get(name, MetricInfo())

    def reduced_metrics(self) -> dict[str, float]:
        """Returns :meth:`metrics` reduced over the ranks as declared, the same on all ranks, after :meth:`flush`.

        A collective call.
        """
        of_ranks = [self.metrics()] if self.transport is None else self.transport.job.gather_objects(self.metrics())
        names = dict.fromkeys(name for metrics in of_ranks for name in metrics)
        return {
            name: self.metric_info(name).reduce([metrics[name] for metrics in of_ranks if name in metrics])
            for name in names
        }

    def summary(self, num_steps: int, before: Mapping[str, float]) -> str:
        """Returns what the method did in ``num_steps`` steps, as a clause without a full stop; called on rank 0.

        Args:
            num_steps: optimizer steps of a rank, of all optimizers; the mean, where ranks take different numbers.
            before: :meth:`metrics` before these steps.
        """
        return counted(num_steps, "step")

    @property
    def ddp_bytes(self) -> float | None:
        """Bytes that a rank sends at least in a step with DDP; None if the method's steps are no such steps."""
        return None

    @property
    def counts_traffic(self) -> bool:
        """Whether :attr:`transport` counts all that steps send and wait for."""
        return True

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state that this rank needs, besides the consolidated weights, to resume bit for bit."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the method's threads and process groups. The weights stay as they are.

        Args:
            timeout_s: maximum seconds to wait for each thread; one at most while an exception is handled, when what is
                in flight may never arrive.
        """
        error = sys.exc_info()[1]
        if self.transport is not None:
            self.transport.watch.close(error)  # first: who waits for this rank, or misses it, learns of its error
        self._detach(timeout_s if is_normal_end(error) else min(timeout_s, AFTER_ERROR_S))

    @abstractmethod
    def _detach(self, timeout_s: float) -> None:
        """Ends what the method has, and then what its base has, see :meth:`detach`."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def group_members(optimizers: Sequence[Optimizer]) -> list[list[list[int]]]:
    """Returns the ids of the parameters in each group of each optimizer; a callback that unfreezes layers adds some."""
    return [[[id(p) for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]
