"""The settings of DeAR."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch.optim import ASGD, SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.core.codecs import Codec, get_codec

#: Optimizers that treat every value by itself: a shard can be updated without the rest.
ELEMENTWISE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, ASGD)

Update = Literal["sharded", "replicated"]
FusionMethod = Literal["buffer", "layers", "none"]


@dataclass(frozen=True)
class DeARConfig:
    """Settings of DeAR (Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
    Pipelining").

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    update: Update | None = None
    """``sharded``: each rank updates its shard of the weights, and the weights are gathered. ``replicated``: the
    gradients are gathered, and each rank updates all (the paper's form). None: ``sharded`` if the optimizer treats
    every value by itself (SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, ASGD), else ``replicated``."""

    elementwise: tuple[type[Optimizer], ...] = ()
    """Further optimizers that treat every value by itself, so that they can be sharded."""

    fusion: FusionMethod = "buffer"
    """Which tensors travel in one piece (Section IV): ``buffer``: neighbours up to ``buffer_mb`` (DeAR-FB); ``layers``:
    those of ``num_layers`` neighbouring layers (DeAR-NL); ``none``: every tensor by itself."""

    buffer_mb: float = 25.0
    """MiB that travel in one piece, with ``fusion="buffer"``."""

    num_layers: int = 4
    """Layers that travel in one piece, with ``fusion="layers"``."""

    compression: str | Codec = "none"
    """Codec of both halves: none, bf16, fp16, truncate16, int8, topk. What it drops is made good in later steps."""

    timeout_s: float = 1800.0
    """Seconds after which a rank that does not answer counts as lost."""

    def __post_init__(self) -> None:
        if self.update is not None and self.update not in get_args(Update):
            raise ValueError(f"update must be one of {get_args(Update)}, got {self.update!r}.")
        if self.fusion not in get_args(FusionMethod):
            raise ValueError(f"fusion must be one of {get_args(FusionMethod)}, got {self.fusion!r}.")
        if not self.buffer_mb > 0:
            raise ValueError(f"buffer_mb must be a positive number of MiB, got {self.buffer_mb!r}.")
        if self.num_layers < 1 or self.num_layers != int(self.num_layers):
            raise ValueError(f"num_layers must be a whole number of at least 1, got {self.num_layers!r}.")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a positive number of seconds, got {self.timeout_s!r}.")
        get_codec(self.compression)

    def shards(self, optimizer: Optimizer) -> bool:
        """Returns whether each rank updates its shard of this optimizer's weights only.

        Raises:
            ValueError: it should, by ``update``, and the optimizer may not treat every value by itself.
        """
        # A subclass of an optimizer that treats every value by itself may not do so.
        known = type(optimizer) in (*ELEMENTWISE, *self.elementwise)
        if self.update == "sharded" and not known:
            names = ", ".join(cls.__name__ for cls in ELEMENTWISE)
            raise ValueError(
                f"update='sharded' divides tensors among the ranks, and {type(optimizer).__name__} is not known to "
                f"treat every value by itself, as {names} do: use update='replicated', or name its class in "
                "elementwise= if it does."
            )
        return known if self.update is None else self.update == "sharded"

    def plan(self) -> Fusion:
        """Returns how tensors are fused."""
        if self.fusion == "buffer":
            return Fusion(bucket_mb=self.buffer_mb)
        return Fusion(num_layers=self.num_layers) if self.fusion == "layers" else Fusion()
