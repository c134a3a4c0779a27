"""The settings of SelSync."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch.optim import SGD, Optimizer

from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.methods.replicas.settings import Average, MakeOptimizer, ReplicaSettings
from lightning_pipesync.methods.setting_types import Compression, Injection, MiB, Seconds
from lightning_pipesync.methods.settings import LowRankMethod, Not, Partition, Topology

Aggregation = Literal["parameters", "gradients"]
Overlap = Literal["forward", "none"]

#: With what some step is synchronized, and with what weights are averaged then.
_SYNCHRONIZES: Mapping[str, Any] = {"delta": Not((math.inf,))}
_AVERAGES_WEIGHTS: Mapping[str, Any] = {"aggregation": ("parameters",), **_SYNCHRONIZES}


@dataclass(frozen=True)
class SelSyncConfig(ReplicaSettings):
    """Settings of SelSync (Tyagi and Swany, "Accelerating Distributed ML Training via Selective Synchronization").

    Raises:
        ValueError: a setting is out of its range, or has no effect with the others; the message names it and its
            value.
    """

    for_trainer = MappingProxyType({"wait_for_hooks": "call synchronize() before you read or write weights"})
    acts_with = MappingProxyType(
        {
            **ReplicaSettings.acts_with,
            "aggregation": _SYNCHRONIZES,
            "average": _SYNCHRONIZES,
            "compression": _SYNCHRONIZES,
            "low_rank": _SYNCHRONIZES,
            "outer_lr": _AVERAGES_WEIGHTS,
            "outer_momentum": _AVERAGES_WEIGHTS,
            "overlap": _AVERAGES_WEIGHTS,
            "wait_for_hooks": {"overlap": ("forward",)},
        }
    )
    compares_steps: ClassVar[bool] = False  # the flags of gradients do, and delta=inf is independent training

    delta: float | Literal["auto"] = "auto"
    """Threshold on the relative gradient change (Section III-B). 0: every step is synchronized; ``inf``: none is.
    ``auto``: delta follows the largest change over all ranks, so that the share ``lssr`` of the steps is local."""

    lssr: float = 0.7
    """With ``delta="auto"``: the target share of local steps (Eq. 4), in [0, 1)."""

    follow_lr: bool = True
    """With ``delta="auto"``: whether fewer steps are synchronized as the learning rate falls, by as much, at most by
    ten: ranks move less then. ``lssr`` is the share at the largest rate so far."""

    aggregation: Aggregation = "parameters"
    """What a synchronized step averages (Section III-C): the updated parameters, or the gradients before the update,
    which ``low_rank`` needs."""

    average: Average = "all_reduce"
    """How a synchronized step averages parameters. ``all_reduce``: each rank sums a share. ``server``: rank 0 is the
    parameter server of Algorithm 1, to which all push, and from which they pull the average; its link carries
    2 (ranks - 1) times the parameters. It has no codec, outer step or overlap."""

    overlap: Overlap = "none"
    """With ``aggregation="parameters"``: where a synchronized step's average runs. ``none``: before ``step()`` returns;
    ``forward``: under the next forward pass, in which each module waits for its weights only. Then set a smaller
    ``bucket_mb``, and in a plain loop let nothing else read or write weights right after a step. A model with compiled
    modules gets ``none``."""

    wait_for_hooks: bool = True

    window: int = 25
    """Steps over which the squared gradient norm is smoothed (Section III-A), with ``smoothing`` below 1."""

    smoothing: float = 0.16
    """Smoothing factor of the moving average, in (0, 1]. The paper uses number of ranks / 100, 0.16 for its 16 ranks;
    then the meaning of ``delta`` depends on the number of ranks."""

    lr_scale: float | Literal["auto"] = "auto"
    """With ``aggregation="parameters"``: factor on the optimizer's learning rate. ``auto``: with ``delta="auto"``, and
    for torch's Adam, AdamW, NAdam and RAdam, as measured, from 1 to the root of the number of ranks, so that a step,
    which the noise of a rank's batch shortens, is as long as with averaged gradients; otherwise 1."""

    outer_lr: float = 1.0
    """With ``aggregation="parameters"``: learning rate of the outer step from the weights of the last synchronized step
    to the average of the replicas. 1: to the average, as in the paper."""

    outer_momentum: float = 0.0
    """With ``aggregation="parameters"``: Nesterov momentum of the outer steps, in [0, 1), as in DiLoCo and SlowMo."""

    partition: Partition = "seldp"
    """Order of the training data (Section III-D): ``seldp`` rotates the chunks; ``defdp`` is the framework's order."""

    full_pass: bool = False

    injection: Injection | None = None
    """Data injection for non-IID data: (alpha, beta) of Section III-E. At each step a share alpha of the ranks sends
    a share beta of its batch to all ranks. Eq. 3 reduces the batch size, so that the cumulative one stays."""

    compression: Compression = "none"
    """Codec of a synchronized step: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk. With
    parameter aggregation it encodes the difference to the parameters of the last synchronized step."""

    error_feedback: bool = True
    """Whether the error of a lossy codec, or of ``low_rank``, is added to the next values."""

    low_rank: int | None = None
    low_rank_method: LowRankMethod = "acp_sgd"
    topology: Topology = "auto"
    torus_columns: int | None = None

    bucket_mb: MiB = 25.0
    """Maximum bucket size in MiB. A bucket is exchanged in one collective, and awaited as a whole."""

    timeout_s: Seconds = 1800.0
    checkpoint_replicas: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("outer_lr", 0 < self.outer_lr < math.inf, "a positive number")
        self._check("outer_momentum", 0 <= self.outer_momentum < 1, "in [0, 1)")
        if self.lr_scale not in ("auto", self.scale_of_steps):
            raise ValueError(
                f"lr_scale={self.lr_scale!r} has no effect with aggregation={self.aggregation!r} and delta="
                f"{self.delta!r}: set aggregation='parameters' and a finite delta, or lr_scale='auto'."
            )
        if self.low_rank is not None:
            refused = {"aggregation": (self.aggregation != "gradients", "gradients", "averages none")}
            self._refuse(f"low_rank={self.low_rank!r} factorizes gradients", "low_rank=None", refused)
        self._check_server()

    def _check_server(self) -> None:
        """Raises a ValueError if a parameter server averages, and a setting needs an all-reduce."""
        if self.average == "all_reduce":
            return
        why = "is for an all-reduce"
        refused = {
            "aggregation": (self.aggregation != "parameters", "parameters", why),
            "compression": (not get_codec(self.compression).lossless, "none", why),
            "outer_lr": (self.outer_lr != 1, 1.0, why),
            "outer_momentum": (self.outer_momentum != 0, 0.0, why),
            "overlap": (self.overlap != "none", "none", why),
            "topology": (self.is_arranged, "auto", why),
        }
        reason = f"average={self.average!r} pushes parameters to a server and pulls their average"
        self._refuse(reason, "average='all_reduce'", refused)

    @property
    def overlaps_forward(self) -> bool:
        return self.overlap == "forward" and self.aggregation == "parameters" and not self.is_local

    @property
    def codec_of_weights(self) -> tuple[str | Codec, bool]:
        return ("none", False) if self.aggregation == "gradients" else super().codec_of_weights

    @property
    def scale_of_steps(self) -> float | Literal["auto"]:
        unscaled = self.aggregation == "gradients" or self.is_local
        return 1.0 if unscaled or (self.lr_scale == "auto" and not self._finds_delta) else self.lr_scale

    @property
    def _finds_delta(self) -> bool:
        return self.delta == "auto" and self.lssr > 0

    @property
    def is_local(self) -> bool:
        """Whether all steps are local."""
        return self.delta == math.inf

    def outer_step(self, optimizer: Optimizer, num_replicas: int) -> MakeOptimizer | None:
        lr, momentum = self.outer_lr, self.outer_momentum
        if self.aggregation == "gradients" or (lr, momentum) == (1, 0):
            return None
        return partial(SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @property
    def needs_as_many_ranks(self) -> bool:
        return True  # each rank has a replica
