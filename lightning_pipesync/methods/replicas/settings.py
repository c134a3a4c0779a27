"""The settings that the engine reads, of a method whose ranks train replicas of the weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.faults.lighthouse import ADDRESS, NUMBER
from lightning_pipesync.methods.settings import Not, Settings

#: How the average of all replicas is made.
Average = Literal["all_reduce", "server"]
#: With which replicas one averages in a round.
Neighbors = Literal["all", "ring", "random_pairs"]
#: Returns an optimizer of some tensors.
MakeOptimizer = Callable[[list[Tensor]], Optimizer]

#: The elastic force times the number of replicas, if it is "auto": beta of EASGD.
BETA = 0.9


class ReplicaSettings(Settings):
    """Base of a method's settings; a method declares and documents those that users may set."""

    acts_with = MappingProxyType(
        {
            **Settings.acts_with,
            "lssr": {"delta": ("auto",)},
            "window": {"smoothing": Not((1,))},
            "num_replicas": {"lighthouse": Not((None,))},
        }
    )

    # When the gradient decides which steps are synchronized (SelSync, Algorithm 1).
    delta: float | Literal["auto"] = "auto"
    lssr: float = 0.7
    follow_lr: bool = False
    window: int = 25
    smoothing: float = 0.16

    bucket_mb: float = 25.0
    overlap_steps: int = 0
    mixing_factor: float | Literal["progress"] = "progress"
    fragments: int = 1
    participation: float = 1.0
    neighbors: Neighbors = "all"
    average: Average = "all_reduce"
    ranks_per_replica: int = 1
    lr_scale: float | Literal["auto"] = 1.0
    warmup_steps: int = 0
    average_optimizer_states: bool = False
    lighthouse: str | None = None
    num_replicas: int | None = None

    def __post_init__(self) -> None:
        self._set_from_environment("lighthouse", ADDRESS)
        if self.lighthouse is not None:
            self._set_from_environment("num_replicas", NUMBER)
        super().__post_init__()
        self._check("delta", self.delta == "auto" or self.delta >= 0, "at least 0")
        self._check("lssr", 0 <= self.lssr < 1, "in [0, 1)")
        self._check_least(window=1, warmup_steps=0, fragments=1, overlap_steps=0, ranks_per_replica=1)
        self._check("smoothing", 0 < self.smoothing <= 1, "in (0, 1]")
        self._check("participation", 0 < self.participation <= 1, "in (0, 1]")
        self._check("lr_scale", self.lr_scale == "auto" or 0 < self.lr_scale < math.inf, "'auto' or a positive number")
        share = self.mixing_factor
        self._check("mixing_factor", share == "progress" or 0 <= share <= 1, "'progress' or in [0, 1]")
        if not get_codec(self.compression).lossless and self.participation < 1:
            raise ValueError(
                f"participation={self.participation!r} averages ranks that other rounds leave out, and compression="
                f"{str(self.compression)!r} keeps what it has dropped for the next round: set participation=1, or "
                "compression='none'."
            )
        self._check_data()
        self._check_topology()
        self._check_jobs()
        Fusion(bucket_mb=self.bucket_mb)

    def _check_topology(self) -> None:
        """Raises a ValueError if averages cannot be on a torus or a tree, or gain nothing there."""
        if self.is_arranged and self.ranks_per_replica > 1:
            raise ValueError(
                f"ranks_per_replica={self.ranks_per_replica!r} arranges the ranks in groups, which topology="
                f"{self.topology!r} would arrange otherwise: set topology='auto', or ranks_per_replica=1."
            )
        if self.topology == "torus2d" and self.overlap_steps:
            raise ValueError(
                f"overlap_steps={self.overlap_steps!r} runs averages under the next steps, and with topology='torus2d' "
                "they advance only while a step waits for them: set topology='flat' or 'tree', or overlap_steps=0."
            )

    def _check_jobs(self) -> None:
        """Raises a ValueError if replicas come and go, and a setting needs all of them all the time."""
        if self.lighthouse is None:
            return
        host, _, port = self.lighthouse.rpartition(":")
        self._check("lighthouse", bool(host) and port.isdigit(), "host:port, such as 'host0:29510'")
        self._check_least(num_replicas=1)
        refused = {
            "injection": (self.injection is not None, None, "needs all ranks' rows in each batch"),
            "partition": (self.partition != "defdp", "defdp", "gives each rank chunks of its own"),
            "warmup_steps": (self.warmup_steps != 0, 0, "averages the gradients of all ranks in each step"),
            "topology": (self.is_arranged, "auto", "arranges replicas that stay"),
        }
        self._refuse(
            f"lighthouse={self.lighthouse!r} is for replicas that come and go", "leave lighthouse out", refused
        )

    def _set_from_environment(self, name: str, variable: str) -> None:
        """Sets a setting that was left out to what a launcher has put into the environment."""
        if getattr(self, name) is None and name in self.__dataclass_fields__ and (value := os.environ.get(variable)):
            object.__setattr__(self, name, int(value) if name == "num_replicas" else value)

    #: Whether ranks compare the numbers of their steps when an average starts, and before weights are consolidated.
    compares_steps: ClassVar[bool] = True

    @property
    def num_jobs(self) -> int | None:
        return None if self.lighthouse is None else self.num_replicas or 1

    @property
    def arrangement(self) -> dict[str, Any]:
        """As of all methods; ``"auto"`` is flat where a torus gains nothing, and where replicas come and go."""
        flat = self.topology == "auto" and (self.overlap_steps > 0 or self.lighthouse is not None)
        return {**super().arrangement, "topology": "flat"} if flat else super().arrangement

    @property
    def codec_of_weights(self) -> tuple[str | Codec, bool]:
        """The codec of averages of weights, and whether its error is added to the next values that it encodes."""
        return self.compression, self.uses_error_feedback

    @property
    def decay_of_residuals(self) -> float:
        """The factor on a codec's residuals from one average to the next."""
        return 1.0

    @property
    def scale_of_steps(self) -> float | Literal["auto"]:
        """``lr_scale``, where steps are of one rank's gradients."""
        return self.lr_scale

    @property
    def overlaps_forward(self) -> bool:
        """Whether averages run under the next forward pass."""
        return False

    @property
    def undoes_averages(self) -> bool:
        """Whether an average can be undone, until all replicas are known to have it: one may be lost before."""
        return self.lighthouse is not None

    def elastic_force_of(self, num_replicas: int) -> float:
        """Returns the share of its distance to the global weights by which a replica is attracted, and they by it."""
        return 0.0

    def outer_step(self, optimizer: Optimizer, num_replicas: int) -> MakeOptimizer | None:
        """Returns what makes the optimizer of the global weights; None: they become the replicas' average."""
        return None


def force_of(force: float | Literal["auto"], num_replicas: int) -> float:
    """Returns the share of its distance to the global weights by which a replica is attracted, and they by it.

    Synchronous EASGD: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, Eqs. 5, 6.
    """
    return BETA / num_replicas if force == "auto" else force


def attracted(num_replicas: int, force: float) -> MakeOptimizer:
    """Returns what makes the optimizer of the global weights, which each replica attracts by ``force``."""
    return partial(SGD, lr=num_replicas * force)


def check_force(name: str, force: float, num_replicas: int, replicas: str = "replicas") -> None:
    """Raises a ValueError if a force, the setting ``name``, moves the global weights beyond the replicas."""
    if (moved := num_replicas * force) > 1:
        raise ValueError(
            f"{name}={force!r} moves the global weights by {moved:.3g} times their distance to {num_replicas} "
            f"{replicas}, beyond them: set {1 / num_replicas:.3g} at most (EASGD: {replicas} * alpha <= 1)."
        )
