"""``python -m benchmarks.timeline``: ``pipesync bench timeline``, of the baselines of the papers, too."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import benchmarks.baselines
import benchmarks.baselines.networks  # noqa: F401 - both add to what can be drawn
from benchmarks import command
from lightning_pipesync.lab.bench import timeline


@dataclass(frozen=True, kw_only=True)
class Timeline(timeline.Timeline):
    """Draws when training steps compute and when they communicate, by method.

    Attributes:
        model: emulated-alexnet, emulated-resnet50, emulated-densenet201, emulated-inceptionv4, emulated-bert-base or
            emulated-bert-large, whose layers sleep.
        methods: What is drawn: ddp, serial, wfbp, mg-wfbp, horovod, byte-scheduler, ps, and methods of this package,
            with settings as in `pipesync bench step`.
    """


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.timeline:Timeline"))
