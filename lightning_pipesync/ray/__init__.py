"""Strategies of the Trainer for workers of Ray Train."""

from __future__ import annotations

from lightning_pipesync.core.extras import check_extra

check_extra("ray", __name__)

from lightning_pipesync.lightning import (
    DeARStrategy,
    EAPipeStrategy,
    LocalSGDStrategy,
    ParameterServerStrategy,
    PipeSGDStrategy,
    SelSyncStrategy,
)
from lightning_pipesync.ray.strategy import RayStrategy


class RayDeARStrategy(DeARStrategy, RayStrategy): ...


class RayEAPipeStrategy(EAPipeStrategy, RayStrategy): ...


class RayLocalSGDStrategy(LocalSGDStrategy, RayStrategy): ...


class RayParameterServerStrategy(ParameterServerStrategy, RayStrategy): ...


class RayPipeSGDStrategy(PipeSGDStrategy, RayStrategy): ...


class RaySelSyncStrategy(SelSyncStrategy, RayStrategy): ...
