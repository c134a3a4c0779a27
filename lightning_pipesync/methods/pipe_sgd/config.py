"""The settings of Pipe-SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lightning_pipesync.methods.setting_types import Compression, MiB, Seconds
from lightning_pipesync.methods.settings import LowRankMethod, Not, Settings, Topology

DelayCompensation = Literal["prediction", "momentum", "staleness", "distance", "none"]


@dataclass(frozen=True)
class PipeSGDConfig(Settings):
    """Settings of Pipe-SGD (Li et al., "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
    Training").

    Raises:
        ValueError: a setting is out of its range, or has no effect with the others; the message names it and its
            value.
    """

    for_trainer = MappingProxyType({"drain": "call the method's drain() after the last step"})
    acts_with = MappingProxyType(
        {
            **Settings.acts_with,
            "segments": {"pipeline_level": (2,)},
            "bucket_mb": {"pipeline_level": (1,)},
            "warmup_steps": {"staleness": Not((0,))},
            "drain": {"staleness": Not((0,))},
            "distance_constant": {"delay_compensation": ("distance",)},
        }
    )

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
    """With ``pipeline_level=2``: L, the number of segments of about the same size into which the gradient is
    divided."""

    warmup_steps: int = 0
    """Synchronous steps before the pipeline fills, with ``staleness`` of at least 1."""

    bucket_mb: MiB | None = None
    """With ``pipeline_level=1``: maximum bucket size in MiB. None: one bucket for each dtype."""

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
        least = {"momentum": 1, "distance": 1, "staleness": 2}.get(self.delay_compensation, 0)
        if self.staleness < least:
            raise ValueError(
                f"delay_compensation={self.delay_compensation!r} has no effect with staleness={self.staleness!r}: set "
                f"staleness={least}, or more, or delay_compensation='none'."
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
