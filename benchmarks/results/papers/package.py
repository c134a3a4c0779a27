"""What no paper has: how far plans are off, and what codecs and methods cost."""

from __future__ import annotations

from benchmarks import plan_accuracy_report
from benchmarks.results.exhibit import Exhibit, Picture
from benchmarks.results.job import Job

JOBS = (
    Job(
        "plan_accuracy",
        "python -m benchmarks.plan_accuracy --hosts 2 4 8 --rates 50mbit 200mbit 1gbit --rounds 2 "
        "--models emulated-resnet50 emulated-bert-base",
        45,
    ),
    Job("overhead", "python -m benchmarks.overhead --steps 20", 3),
    Job("overhead_adamw", "python -m benchmarks.overhead --steps 20 --optimizer adamw", 3),
    Job("codecs", "python -m benchmarks.codecs --threads 1", 1),
)

EXHIBITS: tuple[Exhibit, ...] = (
    Picture(
        "plan_accuracy",
        ("plan_accuracy",),
        lambda records, path: plan_accuracy_report.draw(records[0].results, path),
    ),
)
