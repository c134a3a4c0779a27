"""The settings of Pipe-SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.methods.settings import Settings

DelayCompensation = Literal["prediction", "momentum", "staleness", "distance", "none"]
#: What has gradients computed at predicted weights.
_PREDICTING = ("prediction", "momentum")


@dataclass(frozen=True)
class PipeSGDConfig(Settings):
    """Settings of Pipe-SGD (Li et al., "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
    Training").

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    for_trainer = MappingProxyType({"drain": "call the method's drain() after the last step"})

    staleness: int = 1
    """k: how many steps later a gradient is applied (Algorithm 1). 0: synchronous SGD. The paper's optimum is 1: more
    hides nothing else, and costs convergence."""

    compression: Codec | str = "none"
    """Codec of the all-reduce: none, bf16, fp16, truncate16, int8, topk. Each rank compresses its gradient once."""

    error_feedback: bool = True
    """Whether what a lossy codec drops is added to what is sent next. The paper does without."""

    pipeline_level: Literal[1, 2] = 1
    """1: the gradient travels after the backward pass; 2: in ``segments``, each as soon as it is ready (Fig. 7)."""

    segments: int = 4
    """L: pieces of about the same size into which level 2 divides the gradient."""

    warmup_steps: int = 0
    """Synchronous steps before the pipeline fills."""

    bucket_mb: float | None = None
    """MiB that travel in one piece at level 1. None: the whole gradient, for each of its dtypes."""

    drain: bool = False
    """Whether the last ``staleness`` gradients are applied when the training ends. The paper drops them."""

    delay_compensation: DelayCompensation = "prediction"
    """What makes up for the delay. ``prediction``: a gradient is computed at the weights that the updates on their way
    would lead to, were the averages in them this rank's own gradients; ``momentum``: the same with gradients of zero
    (SpecTrain). Or less learning rate for a stale gradient (lecture, "Staleness Dependent Learning Rate"):
    ``staleness``: it is divided by the number of updates that the gradient is late, which is 1 with ``staleness=1``, so
    that this needs a larger one; ``distance``: it is at most ``distance_constant`` over the squared distance that the
    weights have moved since. ``none``: nothing, as in the paper."""

    distance_constant: float = 1.0
    """C of ``delay_compensation="distance"``."""

    checkpoint_own_gradients: bool = True
    """Whether a checkpoint holds each rank's own part of the gradients in flight, with which it predicts: ``staleness``
    times the weights for every rank. Without them a resumed run predicts its first steps with the averages."""

    timeout_s: float = 1800.0
    """Seconds after which a rank that does not answer counts as lost."""

    def __post_init__(self) -> None:
        for name, least in (("staleness", 0), ("segments", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if value < least or value != int(value):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.pipeline_level not in (1, 2):
            raise ValueError(f"pipeline_level must be 1 or 2, got {self.pipeline_level!r}.")
        if self.pipeline_level == 2 and self.bucket_mb is not None:
            raise ValueError(
                f"pipeline_level=2 divides the gradient into segments={self.segments}: set bucket_mb=None, not "
                f"{self.bucket_mb!r}."
            )
        if self.delay_compensation not in get_args(DelayCompensation):
            raise ValueError(
                f"delay_compensation must be one of {get_args(DelayCompensation)}, got {self.delay_compensation!r}."
            )
        if not 0 < self.distance_constant < math.inf:
            raise ValueError(f"distance_constant must be a positive number, got {self.distance_constant!r}.")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a positive number of seconds, got {self.timeout_s!r}.")
        if self.bucket_mb is not None:
            Fusion(bucket_mb=self.bucket_mb)
        get_codec(self.compression)

    @property
    def uses_error_feedback(self) -> bool:
        """Whether the codec drops something that is added to what is sent next."""
        return self.error_feedback and not get_codec(self.compression).lossless

    @property
    def reduces_learning_rate(self) -> bool:
        """Whether a stale gradient may have less of it."""
        return self.delay_compensation in ("staleness", "distance")

    @property
    def predicts(self) -> bool:
        """Whether gradients are computed at predicted weights."""
        return self.staleness > 0 and self.delay_compensation in _PREDICTING

    @property
    def keeps_own_gradients(self) -> bool:
        """Whether a rank keeps its own part of the gradients that are on their way."""
        return self.predicts and self.delay_compensation == "prediction"

    @property
    def needs_as_many_ranks(self) -> bool:
        """Whether a run can only go on with as many ranks as before: what is to be sent next is each rank's own."""
        return self.uses_error_feedback

    @property
    def lost_with_other_ranks(self) -> str | None:
        """What becomes of that which fits as many ranks only: the gradients in flight."""
        if self.staleness == 0:
            return None
        return "gradients that were on their way are dropped, and the pipeline fills anew"

    def without_effect(self) -> dict[str, str]:
        """Returns the settings that have no effect with the others as they are, by name, and why."""
        ignored, chosen = {}, f"with staleness={self.staleness!r}"
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
        if not self.keeps_own_gradients:
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
