"""The settings of EA-Pipe and of the pipelines that it is compared to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from lightning_pipesync.methods.replicas.settings import check_force
from lightning_pipesync.methods.setting_types import Seconds
from lightning_pipesync.methods.settings import Not, Settings

Algorithm = Literal["ea_pipe", "pipedream", "weight_stashing", "naive", "spectrain", "gpipe", "1f1b"]
Average = Literal["gradients", "elastic"]
Neighbors = Literal["stages", "pipelines"]
Wire = Literal["none", "bf16", "fp16"]
Split = Annotated[
    Literal["balanced", "parameters"] | tuple[int, ...] | tuple[str, ...],
    "'balanced', 'parameters', the indices of the stages' first layers or a tuple of names of submodules",
]

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
#: Algorithms whose stages update before the norm of the gradient over all stages is known.
UNCLIPPED = ("weight_stashing", "naive", "spectrain")
#: Algorithms that divide a mini-batch into micro-batches, and update after all of them.
SYNCHRONOUS = ("gpipe", "1f1b")
#: Algorithms in which a mini-batch updates what the next one uses, so that it can be pulled in between.
PULLED = ("ea_pipe", *SYNCHRONOUS)


@dataclass(frozen=True)
class EAPipeConfig(Settings):
    """Settings of EA-Pipe ("Pipeline Parallelism With Elastic Averaging", IEEE Access 2024).

    Raises:
        ValueError: a setting is out of its range, or has no effect with the others; the message names it and its
            value.
    """

    set_by_trainer = MappingProxyType({"clip_norm": "Trainer(gradient_clip_val=...)"})
    for_trainer = MappingProxyType({"module": "give the pipeline the layers themselves"})
    acts_with = MappingProxyType(
        {
            "elastic_force": {"algorithm": ("ea_pipe",)},
            "period": {"algorithm": ("ea_pipe",)},
            "replicas": {"algorithm": Not(SYNCHRONOUS)},
            "micro_batches": {"algorithm": SYNCHRONOUS},
            "prediction_smoothing": {"algorithm": ("spectrain",)},
            "average": {"num_pipelines": Not((1,))},
            "neighbors": {"num_pipelines": Not((1,))},
            "average_period": {"average": ("elastic",)},
            "average_force": {"average": ("elastic",)},
        }
    )

    elastic_force: float = 0.5
    """alpha of ``ea_pipe``: the fraction of their distance by which a replica and the master are pulled together (Eq.
    1). The paper uses 0.1, 0.3 and 0.5; with a weak force the replicas of many stages drift apart."""

    period: int = 1
    """tau of ``ea_pipe``: the number of a replica's mini-batches between two pulls (Algorithm 1)."""

    algorithm: Algorithm = "ea_pipe"
    """``ea_pipe``; or an algorithm that the paper compares it with: ``pipedream`` (weight stashing and vertical sync),
    ``naive`` (Fig. 1a), ``spectrain`` (weight prediction), or the synchronous ``gpipe`` and ``1f1b``. Also
    ``weight_stashing`` without vertical sync, the default of PipeDream."""

    module: str | None = None
    """Name of the submodule of a LightningModule that is divided. None: its only ``nn.Sequential``."""

    split: Split = "balanced"
    """The layers of each stage: ``balanced`` by their measured time; by their number of ``parameters``; or the indices
    of the first layers of the second and all later stages. For a model that is not an ``nn.Sequential``: the names of
    the submodules with which the second and all later stages begin, in the order in which they are called."""

    replicas: int | None = None
    """The number of mini-batches in flight, each with a replica of the weights. None: the number of stages (N), as in
    the paper, which keeps all stages busy if communication takes no time. More replicas hide the communication."""

    micro_batches: int | None = None
    """The number of micro-batches of ``gpipe`` and ``1f1b``. None: the number of stages."""

    prediction_smoothing: float | None = None
    """The smoothing of the updates from which ``spectrain`` predicts weights; 0: the last update alone. None: 0 if the
    optimizer has a momentum, else 0.9."""

    num_pipelines: int = 1
    """The number of pipelines side by side, which divide the training data: each has an equal part of the ranks, two
    stages or more."""

    average: Average = "gradients"
    """What the pipelines of ``num_pipelines`` have in common. ``gradients``: each mini-batch updates with the mean
    gradient of all pipelines, as a mini-batch of all their samples does. ``elastic``: each pipeline trains by itself,
    and its weights and a reference model attract each other (AvgPipe); with ``ea_pipe``, ``gpipe`` and ``1f1b``."""

    average_period: int = 1
    """With ``average="elastic"``: the number of mini-batches between two averages."""

    average_force: float | Literal["auto"] = "auto"
    """With ``average="elastic"``: the share of their distance by which a pipeline and the reference attract each other,
    at most 1 / ``num_pipelines``. ``auto``: 0.9 / ``num_pipelines`` (EASGD)."""

    neighbors: Neighbors = "stages"
    """With ``num_pipelines`` above 1: what neighboring ranks have, such as those of a host: the ``stages`` of one
    pipeline, so that averages go between hosts; or the same stage of all ``pipelines``, so that activations do."""

    compression: Wire = "none"
    """The dtype in which activations and their gradients are sent: bf16, fp16, or none: the dtype that they have."""

    clip_norm: float | None = None
    """The L2 norm, over all stages, to which the gradient of a mini-batch is clipped; None: no clipping."""

    seed: int = 0
    """The seed of the random numbers of layers and the loss, such as dropout, which depend only on it, the mini-batch
    and the stage."""

    timeout_s: Seconds = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("elastic_force", 0 < self.elastic_force < 1, "between 0 and 1")
        self._check_least(period=1, replicas=1, micro_batches=1, num_pipelines=1, average_period=1)
        self._check_average()
        self._check_split()
        smoothing, clip_norm = self.prediction_smoothing, self.clip_norm
        self._check("prediction_smoothing", smoothing is None or 0 <= smoothing < 1, "at least 0 and less than 1")
        self._check("clip_norm", clip_norm is None or 0 < clip_norm < math.inf, "a positive number")
        if self.clip_norm is not None and self.algorithm in UNCLIPPED:
            raise ValueError(
                f"clip_norm={self.clip_norm!r} needs the norm over all stages, and algorithm={self.algorithm!r} "
                "updates each stage before it is known: clip by value, or use another algorithm."
            )

    def _check_average(self) -> None:
        force = self.average_force
        self._check("average_force", force == "auto" or 0 < force < 1, "'auto' or in (0, 1)")
        if self.average == "elastic" and self.algorithm not in PULLED:
            raise ValueError(
                f"average='elastic' would pull weights of which algorithm={self.algorithm!r} has older versions in "
                f"use: set average='gradients', or algorithm= to one of {', '.join(PULLED)}."
            )
        if force != "auto":
            check_force("average_force", force, self.num_pipelines, "pipelines")

    @property
    def split_names(self) -> tuple[str, ...] | None:
        """The names of submodules in :attr:`split`; None if it has no names."""
        names = tuple(name for name in self.split if isinstance(name, str))
        return names if names and isinstance(self.split, tuple) else None

    def _check_split(self) -> None:
        if isinstance(self.split, str):
            return
        if self.split_names is not None and len(set(self.split_names)) < len(self.split_names):
            raise ValueError(f"split must list names of submodules, each once, got {self.split!r}.")
        indices = [index for index in self.split if isinstance(index, int)]
        if indices != sorted(set(indices)) or min(indices, default=1) < 1:
            raise ValueError(
                f"split must list the indices of the first layers of the later stages, growing and from 1 on, got "
                f"{self.split!r}."
            )

    def data_part(self, rank: int, world_size: int) -> tuple[int, int]:
        """Returns which part of the training data a rank's pipeline trains on, from 0 on, and the number of parts."""
        count = self.num_pipelines
        return rank // (world_size // count) if self.neighbors == "stages" else rank % count, count

    @property
    def lost_with_other_ranks(self) -> str | None:
        if self.num_pipelines > 1 and self.average == "elastic":
            return "all pipelines begin from the reference's weights"
        return "all replicas begin from the master's weights" if self.algorithm == "ea_pipe" else None
