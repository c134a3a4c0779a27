"""Strategies of the Trainer for workers of Ray Train."""

from __future__ import annotations

from lightning_pipesync.core.extras import check_extra

check_extra("ray", __name__)

from ray import train
from ray.train.lightning import RayDDPStrategy
from typing_extensions import override

from lightning_pipesync.lightning import (
    DeARStrategy,
    EAPipeStrategy,
    LocalSGDStrategy,
    ParameterServerStrategy,
    PipeSGDStrategy,
    SelSyncStrategy,
)


class RayStrategy(RayDDPStrategy):
    """Base of the strategies for workers of Ray Train; follows a Trainer's strategy in the bases.

    Ray starts the workers, gives them their ranks and devices, and makes the default process group.
    """

    @property
    @override
    def num_processes(self) -> int:
        """The number of workers on this machine: the Trainer's ``devices`` do not say, on a CPU."""
        return int(train.get_context().get_local_world_size())


class RayDeARStrategy(DeARStrategy, RayStrategy): ...


class RayEAPipeStrategy(EAPipeStrategy, RayStrategy): ...


class RayLocalSGDStrategy(LocalSGDStrategy, RayStrategy): ...


class RayParameterServerStrategy(ParameterServerStrategy, RayStrategy): ...


class RayPipeSGDStrategy(PipeSGDStrategy, RayStrategy): ...


class RaySelSyncStrategy(SelSyncStrategy, RayStrategy): ...
