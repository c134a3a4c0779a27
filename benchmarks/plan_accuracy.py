"""``python -m benchmarks.plan_accuracy``: how far plans are off, and the recommended method beside all others."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch.distributed as dist

import benchmarks.baselines.networks  # noqa: F401 - adds them to the models
from benchmarks import command
from benchmarks import plan_accuracy_report as accuracy_report
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Command, Progress, launched, run_on
from lightning_pipesync.lab.bench.models import EMULATED, TABLES
from lightning_pipesync.lab.netlab.command import LinkOptions
from lightning_pipesync.lab.plan.measure import plan_for
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.predictions import considered, predict
from lightning_pipesync.lab.plan.saved import of_result
from lightning_pipesync.lab.plan.trials import run_in_turns, to_prove
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.plan.work import measure_work

#: What a plan considers, at most: with some models there are fewer bucket sizes and methods.
MOST_CANDIDATES = 32


@dataclass(frozen=True, kw_only=True)
class Accuracy(Command):
    """Makes plans, and runs all methods that they predict, the exact ones with all bucket sizes: how far they are off.

    Attributes:
        hosts: Numbers of hosts, one rank each. Not used if a launcher has started this process.
        rates: Of each host's link in an emulated network, e.g. 50mbit 1gbit. Without it the ranks talk over loopback.
        models: emulated-alexnet, emulated-resnet50, emulated-densenet201, emulated-inceptionv4, emulated-bert-base or
            emulated-bert-large, each with tensors of the size that has the ratio.
        ratio: Communication time over computation time, at the measured bandwidth.
        compute_ms: Forward and backward pass, in milliseconds.
        steps: Least number of steps of one measurement.
        rounds: Number of measurements of each method, in turns.
        output: Folder for accuracy.json, accuracy.md and accuracy.png. Plans that are there already are kept.
    """

    hosts: tuple[int, ...] = (2,)
    rates: tuple[str, ...] | None = None
    models: tuple[str, ...] = ("emulated-resnet50",)
    ratio: tuple[float, ...] = (1.0,)
    compute_ms: float = 150.0
    steps: int = 3
    rounds: int = 3

    name = "accuracy"

    def __post_init__(self) -> None:
        names = [EMULATED + name for name in TABLES]
        for model in self.models:
            if model not in names:
                raise ValueError(f"model={model!r} has no size that can be chosen; there are {', '.join(names)}.")
        if not self.ratio or not all(ratio > 0 for ratio in self.ratio):
            raise ValueError(f"ratio must be positive, got {[*self.ratio]}.")
        self._check_positive("compute_ms", "steps", "rounds")

    def results(self) -> list[dict[str, Any]]:
        """Measures and writes plan by plan."""
        results = accuracy_report.read(self.output / "accuracy.json")
        each = [replace(self, models=(model,), ratio=(ratio,)) for model, ratio in product(self.models, self.ratio)]
        all_links = [LinkOptions(rate=rate) for rate in self.rates or (None,)]
        all_hosts = [*product(all_links, self.hosts)]
        if launched() and len(each) > 1:
            raise ValueError(
                f"models={[*self.models]}, ratio={[*self.ratio]}: a launcher's ranks measure one model and one ratio."
            )
        for settings, (links, hosts) in product(each, all_hosts[:1] if launched() else all_hosts):
            measured = run_on(Accuracy.measure, settings, [hosts], links, 1 + (self.rounds + 1) * MOST_CANDIDATES)
            if not measured:
                return []  # another rank has them
            results += measured
            self.write(results)
        return results

    def report(self, results: list[dict[str, Any]]) -> str:
        return accuracy_report.as_markdown(results)

    def draw(self, results: list[dict[str, Any]]) -> None:
        accuracy_report.draw(results, self.output / "accuracy.png")

    def scaled_to(self, bandwidth: float, world_size: int) -> PlanSettings:
        """Returns what is planned for the first model and ratio, with tensors of that size, or of their true size."""
        [model], [ratio] = self.models, self.ratio
        num_bytes = ratio * self.compute_ms / 1e3 * bandwidth * world_size / (2 * (world_size - 1))
        scale = min(1.0, num_bytes / (4 * TABLES[model.removeprefix(EMULATED)]().numel))
        return PlanSettings(model, scale, self.compute_ms, self.steps, self.rounds)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Plans, and runs all methods, the exact ones with all settings that were considered; a collective call.

        Returns:
            What :func:`plan_for` does, with ``measured``; of the first :func:`considered` ``predicted``: by name
            method, seconds, and whether the plan shows it; and ``recommended``, the name of the exact method.
        """
        planned = self.scaled_to(measure_bandwidth(), dist.get_world_size())
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
                one.name: {"method": one.title, "seconds": one.seconds, "exact": one.exact, "shown": one.name in names}
                for one in all_
            },
            "recommended": (verdict_of(run, measured).exact or run[0]).name,
        }


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.plan_accuracy:Accuracy"))
