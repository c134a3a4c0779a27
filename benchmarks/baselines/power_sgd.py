"""DDP in trainings of tasks, plain and with torch's own communication hook for PowerSGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.candidates import Trainable
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.step import gradient_bytes


@dataclass(frozen=True)
class DDPConfig:
    """Settings of DDP."""

    bucket_mb: float = 25.0
    """MiB of a bucket of gradients."""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be a positive number of MiB, got {self.bucket_mb!r}.")


@dataclass(frozen=True)
class PowerSGDConfig(DDPConfig):
    """Settings of DDP with PowerSGD."""

    rank: int = 4
    """r: columns of the factors of a gradient."""

    start: int = 2
    """Steps with uncompressed gradients before, 2 at least."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("rank", 1), ("start", 2)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {getattr(self, name)!r}.")


class DDPWithPowerSGD(Trainable):
    """PowerSGD with error feedback and warm start, of every gradient whose factors are smaller."""

    def __init__(self, model: BenchModel, config: PowerSGDConfig) -> None:
        module = DistributedDataParallel(model.module, bucket_cap_mb=config.bucket_mb)
        state = PowerSGDState(None, config.rank, start_powerSGD_iter=config.start, min_compression_rate=1)
        module.register_comm_hook(state, powerSGD_hook)
        super().__init__(f"DDP, PowerSGD of rank {config.rank}", model, module, "baseline")
        self._config = config

    def mib_after(self, num_steps: int) -> float:
        """Returns the least MiB of all-reduces of the factors and of the other gradients, those of a ring."""
        uncompressed = min(num_steps, self._config.start)
        return least_mib(
            uncompressed * gradient_bytes(self.model) + (num_steps - uncompressed) * self._compressed_bytes
        )

    @property
    def _compressed_bytes(self) -> int:
        num_bytes = 0
        for parameter in self.module.parameters():
            numel = parameter.numel()
            if parameter.dim() > 1:
                rows = parameter.shape[0]
                numel = min(numel, self._config.rank * (rows + numel // rows))
            num_bytes += numel * parameter.element_size()
        return num_bytes


def least_mib(num_bytes: float) -> float:
    """Returns the least MiB that a rank sends in an all-reduce of so many bytes, those of a ring."""
    return 2 * (dist.get_world_size() - 1) / dist.get_world_size() * num_bytes / MIB
