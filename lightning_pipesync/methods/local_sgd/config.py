"""The settings of local SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

from torch.optim import SGD, Adam, Optimizer

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.methods.local_sgd.clock import BY_GRADIENT, Period, epochs_of
from lightning_pipesync.methods.replicas.settings import (
    MakeOptimizer,
    Neighbors,
    ReplicaSettings,
    attracted,
    force_of,
)
from lightning_pipesync.methods.setting_types import Compression, Injection, MiB, Seconds
from lightning_pipesync.methods.settings import Not, Partition, Topology

OuterOptimizer = Literal["none", "sgd", "nesterov", "adam", "elastic"]

#: ``outer_lr="auto"``: DiLoCo's, and torch's defaults.
OUTER_LR = {"sgd": 1.0, "nesterov": 0.7, "adam": 0.001}
#: ``outer_momentum="auto"``.
OUTER_MOMENTUM = {"sgd": 0.0, "nesterov": 0.9}
#: ``residual_decay="auto"`` of sparse codecs.
SPARSELOCO_DECAY = 0.95


@dataclass(frozen=True)
class LocalSGDConfig(ReplicaSettings):
    """Settings of local SGD: periodic averaging from FedAvg to DiLoCo.

    Raises:
        ValueError: a setting is out of its range, or has no effect with the others; the message names it and its
            value.
    """

    acts_with = MappingProxyType(
        {
            **ReplicaSettings.acts_with,
            **{
                name: {"period": (BY_GRADIENT,), **ReplicaSettings.acts_with.get(name, {})}
                for name in ("delta", "lssr", "window", "smoothing")
            },
            "outer_lr": {"outer_optimizer": tuple(OUTER_LR)},
            "outer_momentum": {"outer_optimizer": tuple(OUTER_MOMENTUM)},
            "elastic_force": {"outer_optimizer": ("elastic",)},
            "mixing_factor": {"overlap_steps": Not((0,)), "outer_optimizer": Not(("elastic",))},
            "residual_decay": {"compression": Not(("none",)), "error_feedback": Not((False,))},
        }
    )

    period: Period = 3
    """H: each fragment is averaged every so many steps. 1: after every step, always. ``"0.25 epoch"``: that share of an
    epoch's steps (E of FedAvg). ``"selsync"``: when the gradient has changed enough on some rank (SelSync, Algorithm
    1); then ``delta``, ``lssr``, ``window`` and ``smoothing`` apply, and the next fragment in turn is averaged."""

    follow_lr: bool = True
    """Whether averages are less frequent as the learning rate falls, by as much, at most by ten: ranks move less then.
    ``period`` in steps is that at the largest rate so far, and so is ``lssr``. Periods of several optimizers, and with
    ``lighthouse``, stay as they are."""

    participation: float = 1.0
    """C of FedAvg: the share of the ranks, or groups, drawn anew in each round, whose weights are averaged, in (0, 1].
    All ranks continue from that average."""

    neighbors: Neighbors = "all"
    """With whom a rank, or group, averages in a round, and continues from that average (gossip). ``all``: all have the
    same weights then. ``ring``: the two beside it in a ring (D-PSGD). ``random_pairs``: one other, drawn anew in each
    round; of an odd number one is left out."""

    ranks_per_replica: int = 1
    """Number of neighboring ranks that train one replica together, such as those of a host: their gradients are
    averaged in each step. The groups are averaged as single ranks are otherwise. It must divide the number of ranks."""

    lr_scale: float | Literal["auto"] = "auto"
    """Factor on the optimizer's learning rate in local steps. ``auto``: for torch's Adam, AdamW, NAdam and RAdam as
    measured, from 1 to the root of the number of replicas, so that a step, which the noise of a rank's batch
    shortens, is as long as with averaged gradients; 1 for others."""

    warmup_steps: int = 0
    """Steps at the beginning whose gradients are averaged, as DDP does (post-local SGD)."""

    outer_optimizer: OuterOptimizer = "none"
    """What moves the global weights, with global weights minus the replicas' average as their gradient. ``none``: they
    become the average. ``sgd``, ``nesterov`` (DiLoCo) and ``adam``: torch's optimizer of that name. ``elastic``:
    replicas and global weights attract each other (EASGD; EAMSGD, if the optimizer has Nesterov momentum)."""

    outer_lr: float | Literal["auto"] = "auto"
    """Learning rate of the outer optimizer. ``auto``: 0.7 for ``nesterov``, as in DiLoCo, 1 for ``sgd``, 0.001 for
    ``adam``."""

    outer_momentum: float | Literal["auto"] = "auto"
    """Momentum of ``sgd`` and ``nesterov``, in [0, 1). ``auto``: 0.9 for ``nesterov``, as in DiLoCo, 0 for ``sgd``."""

    elastic_force: float | Literal["auto"] = "auto"
    """alpha of ``elastic``, in (0, 1): the share of its distance to the global weights by which a replica is attracted,
    and they by it. ``auto``: 0.9 / number of replicas. With ``lighthouse`` it is 1 / number of replicas at most,
    whoever comes."""

    fragments: int = 1
    """Number of pieces of the model, in the order of its layers, which are averaged in turns within a period (Streaming
    DiLoCo): the peak traffic falls by this factor."""

    overlap_steps: int = 0
    """tau of Streaming DiLoCo: steps under which the average of a fragment runs before it is applied, at most
    ``period``. 0: the step waits for it."""

    mixing_factor: float | Literal["progress"] = "progress"
    """With ``overlap_steps``: what stays of a rank's weights when an average is applied. A number in [0, 1]: that share
    (alpha of Streaming DiLoCo, Eq. 3). ``progress``: what they have moved since the average started is added to it
    (CoCoD-SGD)."""

    delta: float | Literal["auto"] = "auto"
    """With ``period="selsync"``: threshold on the relative gradient change. ``auto``: so that the share ``lssr`` of the
    steps is local."""

    lssr: float = 0.7
    """With ``period="selsync"`` and ``delta="auto"``: the target share of local steps, in [0, 1)."""

    window: int = 25
    """With ``period="selsync"``: steps over which the squared gradient norm is smoothed, with ``smoothing`` below
    1."""

    smoothing: float = 0.16
    """With ``period="selsync"``: smoothing factor of the moving average, in (0, 1]."""

    average_optimizer_states: bool = False
    """Whether the optimizers' states are averaged at the end of each period, too. Otherwise they stay as they are."""

    compression: Compression = "none"
    """Codec of the averages: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk. It encodes
    the difference to the global weights."""

    error_feedback: bool = True
    """Whether the error of a lossy codec is added to the next values that it encodes."""

    residual_decay: float | Literal["auto"] = "auto"
    """With a lossy ``compression`` and ``error_feedback``: the factor on an error before the next values are added to
    it, in (0, 1] (beta of SparseLoCo, where it stands for the outer momentum). ``auto``: 0.95 for ``chunked_topk``, as
    in SparseLoCo; 1 for others, which forgets nothing."""

    topology: Topology = "auto"
    torus_columns: int | None = None

    partition: Partition = "defdp"
    """Order of the training data: ``defdp`` is the framework's order; ``seldp`` rotates chunks (SelSync, Section
    III-D)."""

    full_pass: bool = False

    injection: Injection | None = None
    """Data injection for non-IID data: (alpha, beta) of SelSync, Section III-E."""

    bucket_mb: MiB = 25.0
    """Maximum bucket size in MiB. A bucket is exchanged in one collective."""

    timeout_s: Seconds = 1800.0

    lighthouse: str | None = None
    """``host:port`` of the lighthouse of replicas that are jobs of their own, and come and go. None: that of the
    environment variable ``PIPESYNC_LIGHTHOUSE``, which ``pipesync launch`` sets; without it all replicas are in this
    job."""

    num_replicas: int | None = None
    """With ``lighthouse``: the number of replicas that the training begins with. None: that of the environment variable
    ``PIPESYNC_NUM_REPLICAS``, or 1."""

    checkpoint_replicas: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        in_steps = epochs_of(self.period) is None and self.period != BY_GRADIENT
        if in_steps and self.overlap_steps > int(self.period):
            raise ValueError(
                f"overlap_steps={self.overlap_steps!r} is longer than period={self.period!r}: a fragment's average "
                "must be applied before the next one of it starts."
            )
        lr, momentum, force = self.outer_lr, self.outer_momentum, self.elastic_force
        self._check("outer_lr", lr == "auto" or 0 < lr < math.inf, "'auto' or a positive number")
        self._check("outer_momentum", momentum == "auto" or 0 <= momentum < 1, "'auto' or in [0, 1)")
        self._check("elastic_force", force == "auto" or 0 < force < 1, "'auto' or in (0, 1)")
        decay = self.residual_decay
        self._check("residual_decay", decay == "auto" or 0 < decay <= 1, "'auto' or in (0, 1]")
        if self.outer_optimizer == "elastic" and self.participation < 1:
            raise ValueError(
                f"outer_optimizer='elastic' attracts all replicas: set participation=1, not {self.participation!r}."
            )
        if self.lighthouse is not None and self.period == BY_GRADIENT:
            raise ValueError(
                f"lighthouse={self.lighthouse!r} is for replicas that meet in each round alone, and period='selsync' "
                "needs all of them at each step: set a period in steps or epochs."
            )
        self._check_neighbors()
        self._check_gathered()

    def _check_gathered(self) -> None:
        """Raises a ValueError if a codec whose wires are gathered is set beside another momentum than its own."""
        if not get_codec(self.compression).gathered:
            return
        kind, why = self.outer_optimizer, "is another momentum"
        refused = {
            "outer_optimizer": (kind not in ("none", "sgd"), "sgd", why),
            "outer_momentum": (kind == "sgd" and self.outer_momentum not in ("auto", 0), 0.0, why),
        }
        reason = (
            f"compression={str(self.compression)!r} has residuals, which decay by residual_decay, as outer momentum"
        )
        self._refuse(reason, "compression='int4'", refused)

    def _check_neighbors(self) -> None:
        """Raises a ValueError if replicas average with neighbors, and a setting needs the average of all."""
        if self.neighbors == "all":
            return
        lossy, outer = not get_codec(self.compression).lossless, self.outer_optimizer != "none"
        states, lighthouse = self.average_optimizer_states, self.lighthouse is not None
        refused = {
            "topology": (self.is_arranged, "auto", "arranges all replicas"),
            "outer_optimizer": (outer, "none", "moves global weights by the average of all replicas"),
            "participation": (self.participation != 1, 1.0, "leaves replicas out"),
            "period": (self.period == BY_GRADIENT, 16, "has all replicas meet at each step"),
            "average_optimizer_states": (states, False, "averages those of all replicas"),
            "lighthouse": (lighthouse, None, "has all replicas complete a round together, or none"),
            "compression": (lossy, "none", "encodes the difference to weights that all have"),
        }
        self._refuse(f"neighbors={self.neighbors!r} averages with some replicas", "neighbors='all'", refused)

    @property
    def periods_follow_lr(self) -> bool:
        in_steps = epochs_of(self.period) is None and self.period not in (1, BY_GRADIENT)
        return self.follow_lr and in_steps and self.lighthouse is None

    def elastic_force_of(self, num_replicas: int) -> float:
        if self.outer_optimizer != "elastic":
            return 0.0
        force = force_of(self.elastic_force, num_replicas)
        return force if self.lighthouse is None else min(force, 1 / num_replicas)

    @property
    def decay_of_residuals(self) -> float:
        if self.residual_decay == "auto":
            return SPARSELOCO_DECAY if get_codec(self.compression).gathered else 1.0
        return self.residual_decay

    def outer_step(self, optimizer: Optimizer, num_replicas: int) -> MakeOptimizer | None:
        kind = self.outer_optimizer
        if kind == "none":
            return None
        if kind == "elastic":  # each of the ranks attracts the global weights by the force
            return attracted(num_replicas, self.elastic_force_of(num_replicas))
        lr = OUTER_LR[kind] if self.outer_lr == "auto" else self.outer_lr
        if kind == "adam":
            return partial(Adam, lr=lr)
        momentum = OUTER_MOMENTUM[kind] if self.outer_momentum == "auto" else self.outer_momentum
        return partial(SGD, lr=lr, momentum=momentum, nesterov=kind == "nesterov" and momentum > 0)

    @property
    def lost_with_other_ranks(self) -> str | None:
        return "training resumes from the consolidated weights, without the outer optimizer's state"
