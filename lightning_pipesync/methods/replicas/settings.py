"""The settings that the engine reads, of a method whose ranks train replicas of the weights."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.methods.replicas.agreed import MakeOptimizer
from lightning_pipesync.methods.settings import Settings


class ReplicaSettings(Settings):
    """Base of a method's settings; a method declares and documents those that users may set."""

    # When the gradient decides which steps are synchronized (SelSync, Algorithm 1).
    delta: float | Literal["auto"] = "auto"
    lssr: float = 0.8
    window: int = 25
    smoothing: float = 0.16

    bucket_mb: float = 25.0
    overlap_steps: int = 0
    own_share: float | Literal["progress"] = "progress"
    fragments: int = 1
    participation: float = 1.0
    ranks_per_replica: int = 1
    lr_scale: float | Literal["auto"] = 1.0
    warmup_steps: int = 0
    average_optimizer_states: bool = False
    on_lost_rank: str = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("delta", self.delta == "auto" or self.delta >= 0, "at least 0")
        self._check("lssr", 0 <= self.lssr < 1, "in [0, 1)")
        self._check_least(window=1)
        self._check("smoothing", 0 < self.smoothing <= 1, "in (0, 1]")
        self._check_data()
        Fusion(bucket_mb=self.bucket_mb)

    #: Whether ranks compare the numbers of their steps when an average starts, and before weights are consolidated.
    compares_steps: ClassVar[bool] = True

    @property
    def codec_of_weights(self) -> tuple[str | Codec, bool]:
        """The codec of averages of weights, and whether its error is added to the next values that it encodes."""
        return self.compression, self.uses_error_feedback

    @property
    def overlaps_forward(self) -> bool:
        """Whether averages run under the next forward pass."""
        return False

    @property
    def undoes_averages(self) -> bool:
        """Whether an average can be undone, until all ranks are known to have it: a rank may be lost before."""
        return self.on_lost_rank == "continue"

    def elastic_force_of(self, num_replicas: int) -> float:
        """Returns the share of its distance to the agreed weights by which a replica is attracted, and they by it."""
        return 0.0

    def outer_step(self, optimizer: Optimizer, num_replicas: int) -> MakeOptimizer | None:
        """Returns what makes the optimizer of the agreed weights; None: they become the replicas' average."""
        return None

    def without_effect(self) -> dict[str, str]:
        ignored = {}
        if self.smoothing == 1:
            ignored["window"] = "with smoothing=1, which looks at the last step alone: set a smaller one"
        if self.delta != "auto":
            ignored["lssr"] = f"with delta={self.delta:g}, which is constant: set delta='auto'"
        return ignored
