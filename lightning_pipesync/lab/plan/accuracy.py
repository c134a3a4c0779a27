"""How far plans are off: predictions beside measured steps, and the recommended method beside all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.models import EMULATED, TABLES
from lightning_pipesync.lab.plan.measure import plan_for
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.predictions import considered, predict
from lightning_pipesync.lab.plan.saved import of_result
from lightning_pipesync.lab.plan.trials import run_in_turns, to_prove
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.plan.work import measure_work

#: What a plan considers, at most: with some models there are fewer bucket sizes and methods.
MOST_CANDIDATES = 32


@dataclass(frozen=True)
class AccuracySettings:
    """The settings of the benchmark.

    Attributes:
        model: the name of an emulated model.
        compute_ms: its forward and backward pass, in milliseconds.
        ratio: the time of its all-reduce over theirs, at the measured bandwidth, which scales its tensors.
        steps: the least number of steps of a measurement.
        rounds: the number of measurements of each method.

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    model: str
    compute_ms: float
    ratio: float
    steps: int
    rounds: int

    def __post_init__(self) -> None:
        names = [EMULATED + name for name in TABLES]
        if self.model not in names:
            raise ValueError(f"model={self.model!r} has no size that can be chosen; there are {', '.join(names)}.")
        for name in ("compute_ms", "ratio", "steps", "rounds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}.")

    def scaled_to(self, bandwidth: float, world_size: int) -> PlanSettings:
        """Returns what is planned, with tensors of the size that has the ratio, or of their true size."""
        num_bytes = self.ratio * self.compute_ms / 1e3 * bandwidth * world_size / (2 * (world_size - 1))
        scale = min(1.0, num_bytes / (4 * TABLES[self.model.removeprefix(EMULATED)]().numel))
        return PlanSettings(self.model, scale, self.compute_ms, self.steps, self.rounds)


def measure_accuracy(settings: AccuracySettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Plans, and runs all methods, the exact ones with all settings that were considered; a collective call.

    Returns:
        What :func:`plan_for` does, with ``measured``; of the first :func:`considered` ``predicted``: by name method,
        seconds, and whether the plan shows it; and ``recommended``, the name of the exact method.
    """
    planned = settings.scaled_to(measure_bandwidth(), dist.get_world_size())
    model = planned.build()
    result = plan_for(measure_work(model), model.module, asdict(planned), progress)
    work, cluster, _ = of_result(result)
    shown, all_ = predict(work, cluster), considered(work, cluster)
    names = {one.name for one in shown}
    measured = run_in_turns(all_, planned, progress)
    run = to_prove(shown, lambda one: "seconds" in measured[one.name])
    return {
        **result,
        "measured": measured,
        "predicted": {
            one.name: {"method": one.method, "seconds": one.seconds, "exact": one.exact, "shown": one.name in names}
            for one in all_
        },
        "recommended": (verdict_of(run, measured).exact or run[0]).name,
    }
