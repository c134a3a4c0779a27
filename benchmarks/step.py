"""``python -m benchmarks.step``: ``pipesync bench step``, beside the baselines of the papers, too."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmarks.baselines  # noqa: F401 - adds to what can be compared
from benchmarks import command
from benchmarks.parts import OF_PARTS
from lightning_pipesync.lab.bench import step
from lightning_pipesync.lab.bench.pictures import looks_of, picture
from lightning_pipesync.lab.bench.step import rows_of
from lightning_pipesync.lab.predictions.limits import StepCost


@dataclass(frozen=True, kw_only=True)
class Step(step.Step):
    """Times a training step by method, compared with DDP, FSDP2, ZeRO, the papers' baselines and the limits.

    Attributes:
        model: transformer, cnn, resnet50 or bert-base; or emulated-alexnet, emulated-resnet50, emulated-densenet201,
            emulated-inceptionv4, emulated-bert-base or emulated-bert-large, whose layers sleep.
        methods: What is compared: ddp, fsdp2, zero; ddp_powersgd, torch's PowerSGD under DDP; serial, wfbp, mg-wfbp,
            horovod, horovod-bo, byte-scheduler and ps, the papers' baselines; dear-rs and dear-ag, half of DeAR; and
            methods of this package, each with settings if need be, as with `pipesync bench step`.
        bucket_mb: Bucket sizes in MiB of DDP, of SelSync under the forward pass, and of ByteScheduler's pieces; the
            baseline is DDP with its best size.
    """

    def draw(self, results: list[dict[str, Any]]) -> None:
        super().draw(results)
        # Of the ratio in the middle.
        middle = {result["world_size"]: result["runs"][len(result["runs"]) // 2] for result in results}
        draw_scaling(middle, self.output / "scaling.png")
        draw_breakdown(middle, self.output / "breakdown.png")


def draw_scaling(runs: dict[int, dict[str, Any]], path: Path) -> None:
    """Draws the speed-up over one host by number of hosts, with S_max and P."""
    hosts, costs = list(runs), [StepCost(**run["cost"]) for run in runs.values()]
    curves: dict[str, list[float]] = {}
    for world_size, run in runs.items():
        for row in rows_of(run):
            if row.name != "no communication":
                curves.setdefault(row.name, []).append(world_size * row.scaling_efficiency)
    with picture(path, (6, 4.5), legend="panel") as [[panel]]:
        for name, look in looks_of(curves).items():
            panel.plot(hosts, curves[name], markersize=4, label=name, **look)
        limits = [cost.max_speedup(world_size) for world_size, cost in zip(hosts, costs, strict=True)]
        panel.plot(hosts, limits, ":k", label="S_max (Eq. 6)")
        panel.plot(hosts, hosts, "-.k", label="linear")
        title = f"communication {costs[0].ratio:.2g} times computation"
        panel.set(xlabel="hosts", ylabel="times as fast as one host", title=title, xticks=hosts)
        panel.grid(alpha=0.3)


def draw_breakdown(runs: dict[int, dict[str, Any]], path: Path) -> None:
    """Draws the parts of a step: forward, backward, update, exposed communication."""
    with picture(path, (5 * len(runs), 4), columns=len(runs), legend="below", legend_columns=1 + len(runs)) as panels:
        for panel, (world_size, run) in zip(panels[0], runs.items(), strict=True):
            cost, rows = StepCost(**run["cost"]), rows_of(run)
            left = [0.0] * len(rows)
            shared = {"forward": cost.forward, "backward": cost.backward, "update": cost.update}
            bars = {part: [seconds] * len(rows) for part, seconds in shared.items()}
            bars["exposed communication"] = [row.exposed for row in rows]
            for part, values in bars.items():
                milliseconds = [value * 1e3 for value in values]
                panel.barh([row.name for row in rows], milliseconds, left=left, label=part, color=OF_PARTS[part])
                left = [start + value * 1e3 for start, value in zip(left, values, strict=True)]
            panel.invert_yaxis()
            panel.set(xlabel="ms a step", title=f"{world_size} hosts, ratio {cost.ratio:.2g}")


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.step:Step"))
