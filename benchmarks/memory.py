"""``python -m benchmarks.memory``: the memory of a rank of replicas that FSDP2 shards, by the method between them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks import command
from benchmarks.hsdp import ReplicasBenchmark
from benchmarks.resident_memory import forget_peak, map_tensors, peak_bytes, present_bytes
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.benchmark import Progress
from lightning_pipesync.lab.bench.candidates import HSDP, MakeCandidate
from lightning_pipesync.lab.bench.models import EMULATED, BenchModel, build_model, model_names
from lightning_pipesync.lab.bench.step import gradient_bytes
from lightning_pipesync.lab.bench.tables import table_of
from lightning_pipesync.lab.plan.model import device_mesh


@dataclass(frozen=True, kw_only=True)
class Memory(ReplicasBenchmark):
    """Measures the memory of a rank of replicas that FSDP2 shards within hosts, with methods between hosts.

    It is what the process has in memory more than before the model was built: tensors and all buffers, those of Gloo
    included. Start a rank for each device, with torchrun. Linux only.

    Attributes:
        model: transformer-14m, transformer, cnn, resnet50 or bert-base.
        batch_size: Samples of each rank; few, so that activations hide nothing.
        steps: Steps with AdamW that are observed, after as many; of local SGD whole periods.
    """

    model: str = "transformer-14m"
    batch_size: int = 2
    steps: int = 2

    name = "memory"

    def __post_init__(self) -> None:
        if self.model.startswith(EMULATED):
            raise ValueError(
                f"model={self.model!r} has no activations, and keeps its gradients: measure the memory of "
                f"{', '.join(name for name in model_names() if not name.startswith(EMULATED))}."
            )
        self._check_positive("batch_size", "steps")
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return self.num_candidates

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Trains with every candidate, one after the other; a collective call.

        In the result ``memory`` has for each candidate, by its name, the bytes between two steps, and the most that
        steps and a flush have needed, of the rank that needs most.
        ``shard_numel`` counts the parameters of a rank.

        Raises:
            RuntimeError: this is not Linux with glibc.
            ValueError: the ranks do not form two or more replicas.
        """
        map_tensors()
        mesh = device_mesh(self.ranks_per_replica)
        makers = self.makers(mesh)
        self._observe(makers[1])  # what libraries need from then on is not counted
        memory = {}
        for make in makers:
            name, used = self._observe(make)
            memory[name] = used
            progress(name)
        return {
            "settings": self.settings(),
            "replicas": mesh["replicas"].size(),
            "shard_numel": gradient_bytes(self._build()) // 4 // self.ranks_per_replica,
            "memory": memory,
        }

    def _build(self) -> BenchModel:
        torch.manual_seed(0)
        return replace(build_model(self.model, batch_size=self.batch_size), optimizer=_adamw)

    def _observe(self, make: MakeCandidate) -> tuple[str, tuple[int, int]]:
        before = present_bytes()
        candidate = make(self._build())
        candidate.prepare()
        num_steps = -(-self.steps // candidate.period) * candidate.period
        for _ in range(num_steps):
            candidate.step()
        dist.barrier()
        forget_peak()
        between = 0
        for _ in range(num_steps):
            candidate.step()
            between = max(between, present_bytes() - before)
        candidate.drain()
        used = torch.tensor([between, peak_bytes() - before])
        candidate.close()
        dist.all_reduce(used, dist.ReduceOp.MAX)
        return candidate.name, (int(used[0]), int(used[1]))

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(part for result in results for part in _part(result))

    def draw(self, results: list[dict[str, Any]]) -> None:
        """There is no picture."""


def _adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-4)


def _part(result: dict[str, Any]) -> list[str]:
    settings, memory, numel = result["settings"], result["memory"], result["shard_numel"]
    kept = "are freed after the forward pass of a layer" if settings["reshard"] else "stay until the backward pass"
    heading = (
        f"### {result['replicas']} replicas of {settings['ranks_per_replica']} ranks, {settings['model']}\n\n"
        f"{4 * numel / MIB:.1f} MiB of parameters on each rank, AdamW, batches of {settings['batch_size']}; gathered "
        f"weights {kept}. B a parameter: bytes more than HSDP for each parameter of a rank.\n"
    )
    between_of_hsdp, peak_of_hsdp = memory[HSDP]
    columns: dict[str, Callable[[tuple[str, tuple[int, int]]], str]] = {
        "": lambda row: row[0],
        "MiB between steps": lambda row: f"{row[1][0] / MIB:.0f}",
        "B a parameter": lambda row: f"{(row[1][0] - between_of_hsdp) / numel:+.1f}",
        "peak MiB": lambda row: f"{row[1][1] / MIB:.0f}",
        "B a parameter at the peak": lambda row: f"{(row[1][1] - peak_of_hsdp) / numel:+.1f}",
        "peak x HSDP": lambda row: f"{row[1][1] / peak_of_hsdp:.2f}",
    }
    return [heading, table_of(memory.items(), columns)]


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.memory:Memory"))
