"""The settings of DeAR."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.dtensors import ELEMENTWISE
from lightning_pipesync.methods.setting_types import Compression, MiB, MiBRange, OptimizerClasses, Seconds
from lightning_pipesync.methods.settings import LowRankMethod, Not, Settings, Topology

Update = Literal["sharded", "replicated"]
Overlap = Literal["eager", "forward", "none"]
FusionMethod = Literal["auto", "bo", "random", "grid", "buffer", "layers", "none"]

#: Maximum bucket size in MiB where nothing else is set: DDP's.
BUCKET_MB = 25.0

#: Smallest and largest bucket size of the paper's search, in MiB (Section IV-B).
SEARCH_MB = (1.0, 100.0)


@dataclass(frozen=True)
class DeARConfig(Settings):
    """Settings of DeAR (Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
    Pipelining").

    Raises:
        ValueError: a setting is out of its range, or has no effect with the others; the message names it and its
            value.
    """

    for_trainer = MappingProxyType({"wait_for_hooks": "call synchronize() before you read or write weights"})
    acts_with = MappingProxyType(
        {
            **Settings.acts_with,
            "wait_for_hooks": {"overlap": ("eager", "forward")},
            "bucket_mb": {"fusion": Not(("layers", "none"))},
            "edge_mb": {"fusion": Not(("layers", "none"))},
            "search_mb": {"fusion": ("bo", "random", "grid")},
            "trial_steps": {"fusion": ("bo", "random", "grid")},
            "max_trials": {"fusion": ("bo", "random", "grid")},
            "num_layers": {"fusion": ("layers",)},
        }
    )

    update: Update | None = None
    """``replicated``: all-gathers gradients, and each rank updates all weights, as in the paper. ``sharded``: each rank
    updates its shard of the weights, and all-gathers weights; for element-wise optimizers (SGD, Adam, AdamW, RMSprop,
    Adagrad, NAdam, RAdam, Adamax, ASGD); not with ``topology="tree"``. None: ``sharded`` for these where gradients are
    not gathered under backward, with another ``overlap``, compression or several optimizers; otherwise, and on a tree,
    ``replicated``."""

    elementwise: OptimizerClasses = ()
    """Classes of further element-wise optimizers, which step on whole buckets, and can be sharded."""

    overlap: Overlap = "eager"
    """Where the all-gathers run. ``eager``: averaged gradients are gathered under backward already where the network
    would idle, unless ``update="sharded"``, compressed, or with several optimizers. ``forward``: all-gathers start
    after the last reduce-scatter, and run under the next forward pass (the paper, Section III-B). ``none``: they end
    before ``step()`` returns. See ``update=None``, which depends on it."""

    wait_for_hooks: bool = True

    fusion: FusionMethod = "auto"
    """Tensor fusion (Section IV). ``auto``: the fastest of up to three sizes, in some 40 steps; for these a simulation
    of the step, from what the first steps and the network have taken, is shortest. It is ``buffer`` if ``bucket_mb`` is
    set, with several optimizers, and between replicas of several ranks. ``buffer``: buckets up to ``bucket_mb``
    (DeAR-FB); ``bo``: up to a size that Bayesian optimization finds during training (DeAR-BO); ``layers``: of
    ``num_layers`` neighboring layers (DeAR-NL); ``none``: a bucket for every tensor. ``random`` and ``grid`` search in
    other ways."""

    bucket_mb: MiB | None = None
    """Maximum bucket size in MiB, except with ``fusion`` ``layers`` and ``none``; in a search, that of the first trial.
    None: 25."""

    edge_mb: MiB | None = None
    """Maximum size in MiB of the first and of the last bucket, which nothing hides; sizes double towards the middle, up
    to ``bucket_mb``. None: the same for all buckets, with ``fusion="buffer"``."""

    search_mb: MiBRange | None = None
    """With ``fusion`` ``bo``, ``random`` and ``grid``: smallest and largest bucket size, in MiB; at most the size of
    the model. None: 1 to 100, as in the paper; of a model of less than 40 MiB from a fortieth."""

    trial_steps: int = 10
    """With ``fusion`` ``bo``, ``random`` and ``grid``: steps of a trial; fewer with a size that is clearly worse."""

    max_trials: int = 20
    """With ``fusion`` ``bo``, ``random`` and ``grid``: maximum number of trials; a search that has converged ends
    earlier."""

    num_layers: int = 4
    """Layers of a bucket, with ``fusion="layers"``."""

    compression: Compression = "none"
    """Codec of both halves: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk."""

    error_feedback: bool = True
    """Whether the error of a lossy codec, or of ``low_rank``, is added to the next values."""

    low_rank: int | None = None
    low_rank_method: LowRankMethod = "acp_sgd"
    topology: Topology = "auto"
    torus_columns: int | None = None
    timeout_s: Seconds = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("bucket_mb", 0 < self._bucket_mb < math.inf, "a positive number of MiB")
        fits = self.edge_mb is None or 0 < self.edge_mb <= self._bucket_mb
        self._check("edge_mb", fits, f"a positive number of MiB, bucket_mb={self._bucket_mb!r} at most")
        smallest, largest = self.search_mb or SEARCH_MB
        self._check("search_mb", 0 < smallest < largest < math.inf, "a smaller and a larger number of MiB")
        self._check_least(trial_steps=4, max_trials=1, num_layers=1)
        if self.topology == "tree" and self.update == "sharded":
            raise ValueError(
                "update='sharded' needs a shard on every rank, and topology='tree' sums each bucket on two ranks, its "
                "roots: set update='replicated' or None, or topology='flat' or 'torus2d'."
            )
        if self.low_rank is not None:
            refused = {
                "update": (self.update == "sharded", "replicated", "would gather weights, which have no factors")
            }
            self._refuse(f"low_rank={self.low_rank!r} averages factors", "low_rank=None", refused)

    @property
    def _bucket_mb(self) -> float:
        return BUCKET_MB if self.bucket_mb is None else self.bucket_mb

    @property
    def chooses_fusion(self) -> bool:
        """Whether a simulation chooses the sizes of buckets."""
        return self.fusion == "auto" and self.bucket_mb is None and self.edge_mb is None

    @property
    def usual_update(self) -> Update:
        """How an element-wise optimizer updates the weights."""
        whole = self.gathers_early or self.topology == "tree" or self.low_rank is not None
        return self.update or ("replicated" if whole else "sharded")

    @property
    def gathers_early(self) -> bool:
        """Whether all-gathers of gradients may start under backward."""
        lossless = get_codec(self.compression).lossless and self.low_rank is None
        return self.overlap == "eager" and self.update != "sharded" and lossless

    @property
    def needs_as_many_ranks(self) -> bool:
        """Whether a run resumes with as many ranks as before only: each rank has its own residuals."""
        return self.uses_error_feedback or self.low_rank is not None

    def shards(self, optimizer: Optimizer) -> bool:
        """Returns whether each rank updates its shard of this optimizer's weights only.

        Raises:
            ValueError: ``update="sharded"``, and the optimizer is not known to be element-wise.
        """
        known = self.is_elementwise(optimizer)
        if self.update == "sharded" and not known:
            names = ", ".join(cls.__name__ for cls in ELEMENTWISE)
            raise ValueError(
                f"update='sharded' divides tensors among the ranks, and {type(optimizer).__name__} is not known to "
                f"be element-wise, as {names} are: use update='replicated', or name its class in elementwise= if it is."
            )
        return known and self.usual_update == "sharded"

    def is_elementwise(self, optimizer: Optimizer) -> bool:
        """Returns whether this optimizer is known to be element-wise."""
        # A subclass of an element-wise optimizer may not be one.
        return type(optimizer) in (*ELEMENTWISE, *self.elementwise)

    def first_fusion(self) -> Fusion:
        """Returns how tensors are fused, before a simulation or a search changes it."""
        if self.fusion in ("layers", "none"):
            return Fusion(num_layers=self.num_layers if self.fusion == "layers" else None)
        return Fusion(bucket_mb=self._bucket_mb, edge_mb=self.edge_mb)
