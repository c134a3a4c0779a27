"""How fast each codec is on this CPU, beside a plain `Tensor.copy_` of the same values.

python -m benchmarks.codecs --mib 25 --rounds 15 --threads 1

GB/s counts the bytes of the fp32 source, whatever the size of the wire. Rounds are interleaved, so that a slow moment
of a busy machine hits all rows alike; compare the ratios, not the speeds. "feedback" is a whole `encode_with_feedback`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.feedback import encode_with_feedback

NAMES = ("none", "bf16", "fp16", "truncate16", "int8", "int4", "topk", "chunked_topk")
OPERATIONS = ("encode", "decode", "decode_add", "feedback")
Jobs = dict[tuple[str, str], Callable[[], object]]


def codec_jobs(name: str, source: torch.Tensor) -> Jobs:
    """Returns what to time of one codec, by its name and the operation. Every codec has its own buffers."""
    codec = get_codec(name)
    wire = torch.zeros(codec.wire_bytes(source.numel(), source.dtype), dtype=torch.uint8)
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
    """Returns the median seconds of each job over `rounds` interleaved rounds, after one that warms up."""
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    for _ in range(rounds + 1):
        for key, job in jobs.items():
            start = time.perf_counter()
            job()
            seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(times[1:]) for key, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=25, help="size of the fp32 source in MiB")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds to take the median of")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    source = torch.randn(int(arguments.mib * 2**20) // 4)
    copied = torch.zeros_like(source)
    jobs: Jobs = {("copy_", "encode"): lambda: copied.copy_(source)}
    for name in NAMES:
        jobs |= codec_jobs(name, source)
    seconds = measure(jobs, arguments.rounds)

    table = Table(
        title=f"{arguments.mib:g} MiB fp32, {arguments.threads} threads: GB/s (and relative to copy_)", box=box.SIMPLE
    )
    table.add_column("codec")
    table.add_column("wire/source", justify="right")
    for operation in OPERATIONS:
        table.add_column(operation, justify="right")
    for name in ("copy_", *NAMES):
        size = 1 if name == "copy_" else get_codec(name).wire_bytes(source.numel(), source.dtype) / source.nbytes
        took = [seconds[name, operation] for operation in OPERATIONS if (name, operation) in seconds]
        speeds = [f"{source.nbytes / t / 1e9:5.2f} ({seconds['copy_', 'encode'] / t:5.2f})" for t in took]
        table.add_row(name, f"{size:.3f}", *speeds)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
