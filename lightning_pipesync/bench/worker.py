"""One rank of a benchmark: ``python -m lightning_pipesync.bench.worker KIND SETTINGS RESULT``.

SETTINGS is JSON. Rank 0 writes its result as JSON to the file RESULT, and its progress in lines that start with
PROGRESS.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: The prefix of a line of progress on standard output.
PROGRESS = "@progress "


def measure(kind: str, settings: dict[str, Any], progress: Callable[[str], object]) -> dict[str, Any]:
    """Runs a benchmark on this rank, within an initialized default process group, and returns its result."""
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    if kind == "collectives":
        from lightning_pipesync.bench.collectives import CollectivesSettings, measure_collectives

        return measure_collectives(CollectivesSettings(**settings), progress)
    if kind == "step":
        from lightning_pipesync.bench.step import StepSettings, measure_step

        return measure_step(StepSettings(**settings), progress)
    if kind == "timeline":
        from lightning_pipesync.bench.step import StepSettings
        from lightning_pipesync.bench.timeline import measure_timeline

        return measure_timeline(StepSettings(**settings), progress)
    if kind == "converge":
        from lightning_pipesync.bench.converge import ConvergeSettings, measure_converge

        return measure_converge(ConvergeSettings(**settings), progress)
    if kind == "stages":
        from lightning_pipesync.bench.stages import StagesSettings, measure_stages

        return measure_stages(StagesSettings(**settings), progress)
    raise ValueError(f"{kind!r} is not a benchmark that runs on ranks.")


def run_rank(kind: str, settings: dict[str, Any], progress: Callable[[str], object]) -> dict[str, Any] | None:
    """Runs a benchmark as the rank of the environment; returns the result on rank 0."""
    torch.set_num_threads(1)  # the processes of all emulated hosts share this machine
    dist.init_process_group("gloo")
    leader = dist.get_rank() == 0
    measured = measure(kind, settings, progress if leader else lambda text: None)
    dist.barrier()
    dist.destroy_process_group()
    return measured if leader else None


def main(kind: str, settings: str, result: str) -> None:
    measured = run_rank(kind, json.loads(settings), lambda text: print(PROGRESS + text, flush=True))
    if measured is not None:
        Path(result).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
