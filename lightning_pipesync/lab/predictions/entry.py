"""What a method tells ``pipesync bench`` and ``plan`` about itself: its candidates, and its predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.work import MethodWork, Work

if TYPE_CHECKING:
    from lightning_pipesync.methods.method import Method

#: What is said of a training that is not exact, and ended level with DDP (docs/benchmarks.md, docs/results.md).
AT_DDPS_QUALITY = "at DDP's quality in our tests"

#: From so many workers on, local steps of Adam lost quality on text: 20% of the perplexity (docs/benchmarks.md).
MANY_WORKERS = 16

#: The :class:`Exchange` that averages all weights, by codec.
AVERAGES = "averages"


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to take."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # those that differ from the method's defaults
    seconds: float = 0.0  # of a step, on average
    error: float = 0.0  # half the difference that the standard errors of the measured costs make, in seconds
    exact: bool = True  # the training is that of DDP, bit for bit but for the order of sums
    why: str = ""  # what the time consists of, or what is known of its quality
    variant: str = ""  # the settings of all of a group whose training is another one than the method's usual one

    @property
    def name(self) -> str:
        """Method and settings, as ``pipesync bench`` takes them."""
        settings = ",".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.method}:{settings}" if settings else self.method

    @property
    def title(self) -> str:
        """The method, with its variant if there are several, in sentences and pictures."""
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def shown_settings(self) -> str:
        """The settings, for a table."""
        return ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.settings.items()
        )


def waiting_share(compute: float, seconds: float) -> str:
    return f"{1 - compute / seconds:.0%} of a step waits for the network"


@dataclass(frozen=True)
class BenchCandidate:
    """A method with settings, as benchmarks run it."""

    name: str  # in tables
    config: Any
    limit: str = "compute"  # the property of StepCost that bounds the time of its step from below
    codec: str | Codec = "none"  # of its all-reduces, which shorten its limit
    segments: int | None = None  # of an all-reduce that runs under the next step; None: there is none
    period: int = 1  # the number of steps after which what a step does repeats: whole periods are measured
    warmup_steps: int = 1  # until the operations in flight are those of the steady state

    def prepare(self, sync: Any, step: Callable[[], None]) -> dict[str, Any] | None:
        """Runs ``step`` before all measurements, as often as needed; returns the result of a search if there is one."""
        return None

    def before_step(self, sync: Any) -> None:
        """Called before each step."""

    def drain(self, sync: Any) -> None:
        """Waits for the operations in flight after a step."""
        sync.flush()
        sync.resume()


def period_of(config: Any) -> int:
    """Returns the setting ``period``, if there is one and it is a number of steps; otherwise 1."""
    period = getattr(config, "period", 1)
    return period if isinstance(period, int) and period >= 1 else 1


def caution(world_size: int) -> str:
    """Returns what is to be said of the quality of local steps with so many workers."""
    return "" if world_size < MANY_WORKERS else "; with Adam try it first: on text 16 workers lost quality"


@dataclass(frozen=True)
class StandIn:
    """The settings in which a method's hooks and copies are measured, on a stand-in of the model that computes nothing.

    ``waits`` are the seconds of a step in which it communicates gradients of one value each. None: most of its steps
    exchange little, so that larger stand-ins are measured, too, for what depends on the size.
    """

    settings: Mapping[str, Any]
    waits: float | None = None


@dataclass(frozen=True)
class Exchange:
    """An exchange whose cost is measured: steps of the method, without the optimizer's own."""

    name: str  # in Cluster.exchanges, shared by the methods that use it
    settings: Mapping[str, Mapping[str, Any]]  # the method's, by codec
    at_once: bool = False  # all messages of a half are in flight at once, so that alpha counts once


class LabEntry:
    """What the laboratory knows of a method, whose entry in :mod:`lightning_pipesync.lab.predictions` overrides it.

    That of a method of one's own is set with :func:`~lightning_pipesync.lab.predictions.registry.register_lab`.

    Nothing here communicates: predictions are functions of what was measured.

    Attributes:
        compared_by_step: whether ``pipesync bench step`` compares it if the user names no methods.
        exchanges: whose costs a plan measures for :meth:`predict`.
    """

    compared_by_step: bool = False
    exchanges: Sequence[Exchange] = ()

    def __init__(self, method: type[Method]) -> None:
        self.method, self.name = method, method.name

    # --- benchmarks -------------------------------------------------------------------------------------------------

    def bench_candidates(
        self, label: str, settings: Mapping[str, Any], bucket_mb: Sequence[float]
    ) -> list[BenchCandidate]:
        """Returns what ``pipesync bench step`` compares; raises a ValueError if a setting is out of its range.

        ``label`` is the method's name in tables, with the ``settings`` that the user has chosen. ``bucket_mb`` are
        sizes of buckets in MiB to compare, if the method has buckets and the user chooses no size.
        """
        config = self.method.config_type(**settings)
        return [BenchCandidate(label, config, period=period_of(config))]

    # --- plans ------------------------------------------------------------------------------------------------------

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        """Yields predictions in groups, from a step without communication and its costs; of each group a plan has one.

        Of exact settings, and of a variant's, it has the fastest; of others the first that hardly waits, so that those
        that train best come first.
        """
        yield from ()

    def quality(self, prediction: Prediction, optimizer: Optimizer) -> str | None:
        """Returns what tests have shown of the quality of a training, in words; None: not that it is DDP's.

        Then nobody is advised to use it who has not asked for a plan.
        """
        return None

    def trial(self, settings: Mapping[str, Any]) -> BenchCandidate:
        """Returns what a plan runs of a prediction; raises a ValueError if a setting is out of its range."""
        return self.bench_candidates(self.name, settings, ())[0]

    def stand_in(self, work: Work, cluster: Cluster, num_bytes: int) -> StandIn | None:
        """Returns how to measure what the method adds to a step's computation; None: it is taken to add nothing.

        ``num_bytes`` are those of the gradients of a stand-in with tensors of one value.
        """
        return None

    def measure(self, module: nn.Module, optimizer: Optimizer, inputs: Callable[[], Any] | None) -> MethodWork:
        """Measures what the method does with the model's own tensors, on this rank; its gradients are there.

        ``inputs`` returns what the module is called with; None: that is not known.
        """
        return MethodWork()

    def settings_for_racks(self, ranks_per_rack: int) -> Mapping[str, Any] | None:
        """Returns settings that were made for racks with thin uplinks; None: there are none."""
        return None
