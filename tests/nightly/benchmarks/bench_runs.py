"""Benchmarks, run in this process by the words of a user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import command
from lightning_pipesync.cli import main

#: The classes of the commands in benchmarks/; the others are those of ``pipesync``.
CLASSES = {
    "batch_cost": "benchmarks.batch_cost:BatchCost",
    "converge": "benchmarks.converge:Converge",
    "ea_pipe_bound": "benchmarks.ea_pipe_bound:EAPipeBound",
    "gossip": "benchmarks.gossip:Gossip",
    "pipe_bound": "benchmarks.pipe_bound:PipeBound",
    "large_batches": "benchmarks.large_batches:LargeBatches",
    "pipeline": "benchmarks.pipeline:Pipeline",
    "plan_accuracy": "benchmarks.plan_accuracy:Accuracy",
    "scaling": "benchmarks.scaling:Scaling",
    "sensitivity": "benchmarks.sensitivity:Sensitivity",
    "stages": "benchmarks.stages:Stages",
    "staleness": "benchmarks.staleness:Staleness",
    "step": "benchmarks.step:Step",
    "weight_density": "benchmarks.weight_density:WeightDensity",
}


def run_command(name: str, options: str) -> int:
    """Runs ``pipesync NAME OPTIONS``, or ``python -m benchmarks.NAME OPTIONS``; returns its exit status."""
    if name in CLASSES:
        return command.main(CLASSES[name], options.split())
    return main([*name.split(), *options.split()])


def result_of(name: str, options: str, folder: Path) -> dict[str, Any]:
    """Runs a command, which has to succeed, with ``folder`` as its output; returns the only result there."""
    assert run_command(name, f"{options} --output {folder}") == 0
    [result] = json.loads((folder / f"{name.split()[-1]}.json").read_text())["results"]
    return dict(result)


def assert_pictures(folder: Path, *names: str) -> None:
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
