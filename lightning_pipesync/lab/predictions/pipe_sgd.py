"""What the laboratory knows of Pipe-SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.dtensors import local_of
from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import AT_DDPS_QUALITY, BenchCandidate, LabEntry, Prediction, StandIn
from lightning_pipesync.lab.predictions.work import MethodWork, Work
from lightning_pipesync.methods.hyperparameters import current
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.prediction import PredictedWeights, TrialStep

#: Codecs of which trainings with SGD and with AdamW ended level with DDP.
TESTED = ("none", "int8")

#: How often the prediction of weights is measured.
REPEATS = 5


class PipeSGDCandidate(BenchCandidate):
    """Pipe-SGD, whose all-reduce runs under the next step."""

    def drain(self, sync: Any) -> None:
        sync.drain()


class PipeSGDLab(LabEntry):
    """All-reduces that hide under whole steps, with each codec."""

    def bench_candidates(
        self, label: str, settings: Mapping[str, Any], bucket_mb: Sequence[float]
    ) -> list[BenchCandidate]:
        config = PipeSGDConfig(**settings)
        candidate = PipeSGDCandidate(
            label,
            config,
            limit="under_next_step",
            codec=config.compression,
            segments=config.segments if config.pipeline_level == 2 else 1,
            warmup_steps=2,  # the gradient of the first may have started within its backward pass
        )
        return [candidate]

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        seconds = {c: link.all_reduce(work.num_bytes, cluster.world_size) for c, link in cluster.all_reduces.items()}
        yield [
            Prediction(
                self.name,
                {} if codec == "none" else {"compression": codec},
                max(work.seconds_with(self.name), of_codec),
                exact=False,
                why="one step late, at predicted weights",
            )
            for codec, of_codec in seconds.items()
        ]

    def quality(self, prediction: Prediction, optimizer: Optimizer) -> str | None:
        is_tested = type(optimizer) in (SGD, AdamW) and prediction.settings.get("compression", "none") in TESTED
        return AT_DDPS_QUALITY if is_tested else None

    def stand_in(self, work: Work, cluster: Cluster, num_bytes: int) -> StandIn:
        waits = cluster.all_reduces["none"].all_reduce(num_bytes, cluster.world_size)
        return StandIn({"delay_compensation": "none"}, waits)

    def measure(self, module: nn.Module, optimizer: Optimizer, inputs: Callable[[], Any] | None) -> MethodWork:
        """Measures the prediction of weights, and the copies of gradients to and from buffers."""
        pairs = [(p, p.grad) for p in map(local_of, module.parameters()) if p.grad is not None]
        parameters, gradients = [p for p, _ in pairs], [grad for _, grad in pairs]
        bucket = Bucket(parameters)
        step = TrialStep({id(p): grad for p, grad in pairs}, current(optimizer))
        predicted = PredictedWeights(optimizer, lambda: [step])
        clock = Clock(device_of(module))
        moments = [clock.now()]
        for _ in range(REPEATS):
            bucket.pack_gradients(parameters)
            bucket.unpack(gradients)
            predicted.use()
            predicted.forget()
            moments.append(clock.now())
        return MethodWork(median(clock.seconds_between(*pair) for pair in pairwise(moments)))
