"""``python -m benchmarks.codecs``: how fast each codec is on this CPU, beside a plain ``Tensor.copy_``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks import command
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.feedback import encode_with_feedback
from lightning_pipesync.lab.bench.benchmark import Command
from lightning_pipesync.lab.bench.tables import environment, table
from lightning_pipesync.lab.bench.timing import timed

NAMES = ("none", "bf16", "fp16", "truncate16", "fp8", "int8", "int4", "int2", "topk", "chunked_topk")
OPERATIONS = ("encode", "decode", "decode_add", "feedback")
Jobs = dict[tuple[str, str], Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Codecs(Command):
    """Times the codecs, in turns, so that a slow moment of a busy machine meets all alike: compare ratios, not speeds.

    Attributes:
        mib: MiB of the fp32 source.
        rounds: Number of measurements of each, in turns; the first, which warms up, is one more.
        threads: CPU threads of torch.
    """

    mib: float = 25.0
    rounds: int = 15
    threads: int = 1

    name = "codecs"

    def __post_init__(self) -> None:
        self._check_positive("mib", "rounds", "threads")

    def results(self) -> list[dict[str, Any]]:
        torch.set_num_threads(self.threads)
        source = torch.randn(int(self.mib * MIB) // 4)
        copied = torch.zeros_like(source)
        jobs: Jobs = {("copy_", "encode"): lambda: copied.copy_(source)}
        for name in NAMES:
            jobs |= codec_jobs(name, source)
        seconds = measure(jobs, self.rounds)
        rows = [
            {
                "name": name,
                "share": 1 if name == "copy_" else wire_bytes(name, source) / source.nbytes,
                "seconds": {one: seconds[name, one] for one in OPERATIONS if (name, one) in seconds},
            }
            for name in ("copy_", *NAMES)
        ]
        return [{"settings": self.settings(), "environment": environment(), "num_bytes": source.nbytes, "rows": rows}]

    def report(self, results: list[dict[str, Any]]) -> str:
        [result] = results
        copied = next(row["seconds"]["encode"] for row in result["rows"] if row["name"] == "copy_")
        lines = []
        for row in result["rows"]:
            took = [row["seconds"].get(operation) for operation in OPERATIONS]
            cells = [f"{result['num_bytes'] / s / 1e9:.2f} ({copied / s:.2f})" if s else "" for s in took]
            lines.append([row["name"], f"{row['share']:.3f}", *cells])
        settings = result["settings"]
        return f"""{settings["mib"]:g} MiB of fp32, {settings["threads"]} threads: GB of the source per second, whatever
the size of the wire, and in brackets relative to `copy_`. Feedback is an encoding with error feedback.

{table(["codec", "wire / source", *(name.replace("_", " and ") for name in OPERATIONS)], lines)}"""

    def draw(self, results: list[dict[str, Any]]) -> None:
        """There is no picture."""


def wire_bytes(name: str, source: torch.Tensor) -> int:
    """Returns the bytes of the encoded source."""
    return get_codec(name).wire_bytes(source.numel(), source.dtype)


def codec_jobs(name: str, source: torch.Tensor) -> Jobs:
    """Returns what to time of one codec, by its name and the operation. Every codec has its own buffers."""
    codec = get_codec(name)
    wire = torch.zeros(wire_bytes(name, source), dtype=torch.uint8)
    target, compensated, residual = torch.zeros_like(source), torch.zeros_like(source), torch.zeros_like(source)
    return {
        (name, "encode"): lambda: codec.encode(source, wire),
        (name, "decode"): lambda: codec.decode(wire, target, source.dtype),
        (name, "decode_add"): lambda: codec.decode_add(wire, target, source.dtype),
        # As in training, where each step brings a new gradient: otherwise source and residual would double each round.
        (name, "refresh"): lambda: compensated.copy_(source),
        (name, "feedback"): lambda: encode_with_feedback(codec, compensated, wire, residual),
    }


def measure(jobs: Jobs, rounds: int) -> dict[tuple[str, str], float]:
    """Returns the median seconds of each job over ``rounds`` interleaved rounds, after one that warms up."""
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    for _ in range(rounds + 1):
        for key, job in jobs.items():
            seconds[key].append(timed(job))
    return {key: median(times[1:]) for key, times in seconds.items()}


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.codecs:Codecs"))
