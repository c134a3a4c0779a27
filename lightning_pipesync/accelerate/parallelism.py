"""Accelerate's configuration of a device mesh, of which a method has one dimension; Accelerate 1.3 has none."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from typing_extensions import override

from lightning_pipesync.accelerate.private import use_fsdp_on_cpu
from lightning_pipesync.accelerate.sharding import REPLICAS
from lightning_pipesync.core.private_names import ChecksOverrides


class ReplicasConfig(ChecksOverrides, ParallelismConfig):
    """A ParallelismConfig with which FSDP2 shards along ``dp_shard`` alone, and leaves ``dp_replicate`` to a method.

    With Accelerate's own, FSDP2 has both dimensions (HSDP). On the CPU, where Accelerate ignores an ``fsdp_plugin``, it
    shards, too.

    Args:
        config: the sizes of the dimensions.
        plugin: how FSDP2 shards.
    """

    def __init__(self, config: ParallelismConfig, plugin: Any) -> None:
        super().__init__(**{field.name: getattr(config, field.name) for field in fields(config)})
        self._plugin = plugin

    @property
    @override
    def fsdp_dim_names(self) -> list[str]:
        return [name for name in super().fsdp_dim_names if name != REPLICAS]

    @override
    def get_device_mesh(self, device_type: str | None = None) -> Any:
        if device_type == "cpu":
            use_fsdp_on_cpu(self._plugin)
        return super().get_device_mesh(device_type)
