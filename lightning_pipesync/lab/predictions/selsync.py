"""What the laboratory knows of SelSync."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from typing import Any

from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import AVERAGES, BenchCandidate, LabEntry, Prediction, StandIn, caution
from lightning_pipesync.lab.predictions.work import Work
from lightning_pipesync.methods.selsync.config import SelSyncConfig

#: The shares of local steps that are tried.
LSSR = (0.5, 0.75, 0.9)

#: A threshold that no relative change of a gradient reaches.
LARGE_DELTA = 1e9


@dataclass(frozen=True)
class WithShareOfLocalSteps(BenchCandidate):
    """Synchronizes a given share of the steps, evenly distributed, whatever the gradients, which do not change.

    Attributes:
        synchronized: the number of synchronized steps in a period.
    """

    synchronized: int = 1
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def before_step(self, sync: Any) -> None:
        due = next(self._numbers) * self.synchronized % self.period < self.synchronized
        sync.delta = 0.0 if due else math.inf


class SelSyncLab(LabEntry):
    """Synchronized steps, local ones, and shares of both."""

    compared_by_step = True

    def bench_candidates(
        self, label: str, settings: Mapping[str, Any], bucket_mb: Sequence[float]
    ) -> list[BenchCandidate]:
        """Returns a step that is synchronized, and without settings one that is local.

        The former for each bucket size if the average is hidden under the forward pass, unless the settings name one.
        """
        for name in {"delta", "lssr"} & settings.keys():
            raise ValueError(f"methods: {name}={settings[name]!r} has no effect on a step that is synchronized.")
        config = SelSyncConfig(**settings, delta=0.0)
        sizes: list[tuple[str, dict[str, Any]]] = [("", {})]
        if config.overlaps_forward and "bucket_mb" not in settings and bucket_mb:
            sizes = [(f", {size:g} MiB", {"bucket_mb": size}) for size in bucket_mb]
        limit = "under_forward" if config.overlaps_forward else "serial"
        found = [
            BenchCandidate(f"{label}, synchronized step{shown}", replace(config, **fixed), limit)
            for shown, fixed in sizes
        ]
        if not settings:
            found.append(BenchCandidate(f"{label}, local step", replace(config, delta=LARGE_DELTA)))
        return found

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        if averages := cluster.exchanges.get(AVERAGES):
            average = averages["none"].all_reduce(work.num_bytes, cluster.world_size)
            yield [
                Prediction(
                    self.name,
                    {"lssr": lssr},
                    work.seconds_with(self.name) + (1 - lssr) * average,
                    exact=False,
                    why=f"{lssr:.0%} of the steps are local{caution(cluster.world_size)}",
                )
                for lssr in LSSR
            ]

    def trial(self, settings: Mapping[str, Any]) -> BenchCandidate:
        config = SelSyncConfig(**settings)
        period = Fraction(1 - config.lssr).limit_denominator(100).denominator
        return WithShareOfLocalSteps(
            self.name,
            replace(config, delta=0.0, lssr=SelSyncConfig.lssr),
            period=period,
            synchronized=round((1 - config.lssr) * period),
        )

    def stand_in(self, work: Work, cluster: Cluster, num_bytes: int) -> StandIn:
        return StandIn({"lssr": 0.99})
