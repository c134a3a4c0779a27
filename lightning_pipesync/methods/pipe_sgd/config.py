"""The settings of Pipe-SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lightning_pipesync.methods.setting_types import Compression, MiB, Seconds
from lightning_pipesync.methods.settings import LowRankMethod, Settings, Topology

DelayCompensation = Literal["prediction", "momentum", "staleness", "distance", "none"]


@dataclass(frozen=True)
class PipeSGDConfig(Settings):
    """Settings of Pipe-SGD (Li et al., "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
    Training").

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    for_trainer = MappingProxyType({"drain": "call the method's drain() after the last step"})

    staleness: int = 1
    """k: by how many steps the update is later than its gradient (Algorithm 1). 0: synchronous SGD. The paper's optimum
    is 1: larger values hide no more communication, and slow convergence."""

    compression: Compression = "none"
    """Codec of the all-reduce: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk. Each rank
    compresses its gradient once."""

    error_feedback: bool = True
    """Whether the error of a lossy codec, or of ``low_rank``, is added to the next values; not in the paper."""

    low_rank: int | None = None
    low_rank_method: LowRankMethod = "acp_sgd"
    topology: Topology = "auto"
    torus_columns: int | None = None

    pipeline_level: Literal[1, 2] = 1
    """1: the all-reduce starts after the backward pass; 2: that of each of ``segments`` when it is ready (Fig. 7)."""

    segments: int = 4
    """L: number of segments of about the same size into which level 2 divides the gradient."""

    warmup_steps: int = 0
    """Synchronous steps before the pipeline fills."""

    bucket_mb: MiB | None = None
    """Maximum bucket size in MiB at level 1. None: one bucket for each dtype."""

    drain: bool = False
    """Whether the end of training applies the last ``staleness`` gradients, which the paper drops."""

    delay_compensation: DelayCompensation = "prediction"
    """How the delay is compensated. ``prediction``: gradients are computed at the weights after the updates in flight,
    which each rank predicts with its own gradients; ``momentum``: predicted with gradients of zero (SpecTrain). Or by a
    smaller learning rate (lecture, "Staleness Dependent Learning Rate"): ``staleness``: divided by the number of
    updates that the gradient is late, which needs ``staleness`` of at least 2; ``distance``: at most
    ``distance_constant`` over the squared distance that the weights have moved since. ``none``: not at all, as in the
    paper."""

    distance_constant: float = 1.0
    """C of ``delay_compensation="distance"``."""

    checkpoint_own_gradients: bool = True
    """Whether a checkpoint holds each rank's own part of the gradients in flight, with which it predicts: ``staleness``
    times the weights for every rank. Without them a resumed run predicts its first steps with the averages."""

    timeout_s: Seconds = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_least(staleness=0, segments=1, warmup_steps=0)
        if self.pipeline_level == 2 and self.bucket_mb is not None:
            raise ValueError(
                f"pipeline_level=2 divides the gradient into segments={self.segments}: set bucket_mb=None, not "
                f"{self.bucket_mb!r}."
            )
        self._check("distance_constant", 0 < self.distance_constant < math.inf, "a positive number")
        self._check("bucket_mb", self.bucket_mb is None or self.bucket_mb > 0, "a positive number of MiB")

    @property
    def reduces_learning_rate(self) -> bool:
        return self.delay_compensation in ("staleness", "distance")

    @property
    def predicts(self) -> bool:
        """Whether gradients are computed at predicted weights."""
        return self.staleness > 0 and self.delay_compensation in ("prediction", "momentum")

    @property
    def keeps_local_gradients(self) -> bool:
        """Whether a rank keeps the values of its own part of the gradients in flight."""
        return self.predicts and self.delay_compensation == "prediction"

    @property
    def needs_as_many_ranks(self) -> bool:
        """Whether a run resumes with as many ranks as before only: each rank has its own residuals."""
        return self.uses_error_feedback or self.low_rank is not None

    @property
    def lost_with_other_ranks(self) -> str | None:
        if self.staleness == 0:
            return None
        return "gradients in flight are dropped, and the pipeline fills anew"

    def without_effect(self) -> dict[str, str]:
        ignored, chosen = super().without_effect(), f"with staleness={self.staleness!r}"
        if self.pipeline_level == 1:
            ignored["segments"] = "with pipeline_level=1: set pipeline_level=2"
        if self.delay_compensation != "distance":
            ignored["distance_constant"] = (
                f"with delay_compensation={self.delay_compensation!r}: set delay_compensation='distance'"
            )
        if self.delay_compensation == "staleness" and self.staleness == 1:
            ignored["delay_compensation"] = (
                f"{chosen}: a gradient is at most one update late, and the learning rate is divided by 1. Set "
                "staleness to at least 2, or delay_compensation='distance' or 'none'"
            )
        if not self.keeps_local_gradients:
            ignored["checkpoint_own_gradients"] = (
                f"with staleness={self.staleness!r} and delay_compensation={self.delay_compensation!r}: no rank keeps "
                "gradients of its own"
            )
        if self.staleness == 0:
            for name in ("warmup_steps", "drain"):
                ignored[name] = f"{chosen}, which is synchronous: set staleness to at least 1"
            if self.delay_compensation != "none":
                ignored["delay_compensation"] = f"{chosen}: no gradient is late. Set staleness to at least 1"
        return ignored
