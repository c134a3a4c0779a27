"""What the laboratory knows of local SGD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import (
    AVERAGES,
    BenchCandidate,
    Exchange,
    LabEntry,
    Prediction,
    StandIn,
    caution,
    period_of,
)
from lightning_pipesync.lab.predictions.work import Work
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig

#: With and without codecs and averages under computation, each with the shortest period that hardly waits.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"compression": "int8"},
    {"compression": "int8", "fragments": 4, "overlap_steps": 4},
    {"compression": "int4"},
)

#: From this period on trainings at DDP's best learning rate ended behind DDP (docs/benchmarks.md).
LONG = 8

#: The periods that are tried.
PERIODS = (4, 8, 16, 32, 64)


class LocalSGDLab(LabEntry):
    """Averages of weights every so many steps, perhaps under the steps that follow."""

    exchanges = (
        Exchange(AVERAGES, {codec: {"period": 1, "compression": codec} for codec in ("none", "int8", "int4")}),
    )

    def bench_candidates(
        self, label: str, settings: Mapping[str, Any], bucket_mb: Sequence[float]
    ) -> list[BenchCandidate]:
        config = LocalSGDConfig(**settings)
        period = period_of(config)
        return [BenchCandidate(label, config, period=period, warmup_steps=period if config.overlap_steps > 0 else 0)]

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        averages = cluster.exchanges.get(AVERAGES, {})
        for variant in VARIANTS:
            codec = variant.get("compression", "none")
            if codec in averages:
                average = averages[codec].all_reduce(work.num_bytes, cluster.world_size)
                on_wire = cluster.seconds_on_wire(work.num_bytes, codec)
                chosen = [{"period": period, **variant} for period in PERIODS]
                yield [self._predict(work, cluster, average, on_wire, settings) for settings in chosen]

    def stand_in(self, work: Work, cluster: Cluster, num_bytes: int) -> StandIn:
        return StandIn({"period": 10**6})

    def settings_for_racks(self, ranks_per_rack: int) -> Mapping[str, Any]:
        return {"ranks_per_replica": ranks_per_rack}

    def _predict(
        self, work: Work, cluster: Cluster, average: float, on_wire: float, settings: Mapping[str, Any]
    ) -> Prediction:
        seconds = step_seconds(work.seconds_with(self.name), average, on_wire, settings)
        why = f"averages every {settings['period']} steps"
        why += "" if settings["period"] < LONG else ", with a smaller learning rate"
        why += caution(cluster.world_size)
        return Prediction(self.name, settings, seconds, exact=False, why=why)


def step_seconds(compute: float, average: float, on_wire: float, settings: Mapping[str, Any]) -> float:
    """Returns the seconds of a step, on average over a period.

    The average of a fragment runs under ``overlap_steps`` steps, and what is left of it is waited for.

    Args:
        compute: seconds of a step without communication.
        average: seconds in which all weights are averaged.
        on_wire: seconds of these that the network takes; the processor is busy for the others, and they are not hidden.
        settings: ``period``, ``fragments`` and ``overlap_steps``.
    """
    period, fragments, overlap = settings["period"], settings.get("fragments", 1), settings.get("overlap_steps", 0)
    waited = max(0.0, average / fragments - overlap * compute) * fragments
    works = max(0.0, average - on_wire)
    return max(compute + max(waited, works) / period, average / period)
