"""Models that Accelerate shards by FSDP2 (``fsdp_plugin``), between whose replicas a method runs."""

from __future__ import annotations

import os
import warnings
from dataclasses import fields
from typing import Any

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import is_initialized
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.accelerate.private import mark_prepared, prepared_models, use_fsdp_on_cpu
from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.session import contains

#: The dimension of Accelerate's device mesh along which a method runs.
REPLICAS = "dp_replicate"
#: What a user sets so that there are replicas.
RECIPE = (
    "set parallelism_config=ParallelismConfig(dp_replicate_size=HOSTS, dp_shard_size=RANKS_PER_HOST), or in a "
    "configuration file 'parallelism_config:' with parallelism_config_dp_replicate_size and "
    "parallelism_config_dp_shard_size"
)
#: The same where each job is a replica.
RECIPE_OF_JOBS = (
    "set parallelism_config=ParallelismConfig(dp_shard_size=RANKS_OF_THE_JOB), or in a configuration file "
    "'parallelism_config:' with parallelism_config_dp_shard_size"
)


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


def with_replicas(settings: dict[str, Any], method: str, is_job: bool = False) -> dict[str, Any]:
    """Returns an Accelerator's settings with which FSDP2 leaves the dimension of the replicas to a method.

    If the whole job is a replica (``is_job``), FSDP2 shards among all ranks. Without FSDP, or in one process, they are
    ``settings``. Those that Accelerate reads from the environment count.

    Raises:
        ValueError: FSDP is configured in a way that leaves no replicas, or that the methods do not support.
    """
    if is_initialized() or int(os.environ.get("WORLD_SIZE", 1)) == 1 or (plugin := _plugin(settings)) is None:
        return settings
    recipe = RECIPE_OF_JOBS if is_job else RECIPE
    if METHODS[method].makes_passes:
        raise ValueError(
            f"method={method!r} divides the model among the ranks itself: remove the fsdp_plugin, and "
            "'distributed_type: FSDP' from the configuration file."
        )
    if (version := plugin.fsdp_version) != 2:
        raise ValueError(
            f"fsdp_version={version} is not supported with method={method!r}: set fsdp_version=2 in the fsdp_plugin or "
            f"the configuration file, and {recipe}."
        )
    if (config := _parallelism(settings)) is None:
        raise ValueError(
            f"fsdp_plugin without parallelism_config shards the model over all ranks, and method={method!r} runs "
            f"between replicas: {recipe}."
        )
    from torch.distributed.fsdp import CPUOffloadPolicy

    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError(
            f"cpu_offload=True is not supported with method={method!r}, which updates the weights on the device: set "
            "cpu_offload=False in the fsdp_plugin (fsdp_offload_params: false), and a larger dp_shard_size if the "
            "memory does not suffice."
        )
    for name in ("tp_size", "cp_size", "sp_size"):
        if getattr(config, name) > 1:
            raise ValueError(
                f"{name}={getattr(config, name)} in parallelism_config is not supported with method={method!r}, which "
                f"needs all parameters to be sharded along dp_shard alone: set {name}=1, and a larger dp_shard_size."
            )
    return {**settings, "fsdp_plugin": plugin, "parallelism_config": ReplicasConfig(config, plugin)}


def warn_of_one_replica(accelerator: Accelerator, method: str) -> None:
    if shards_by_fsdp2(accelerator) and replicas_of(accelerator) is None:
        warnings.warn(
            f"{REPLICAS}_size=1: there is one replica, which FSDP2 trains alone, and {method} has nothing to do. Set "
            f"{REPLICAS}_size to the number of hosts.",
            stacklevel=3,
        )


def shards_by_fsdp2(accelerator: Accelerator) -> bool:
    """Returns whether Accelerate shards the models that it prepares."""
    return bool(accelerator.is_fsdp2)


def leaves_replicas(accelerator: Accelerator) -> bool:
    """Returns whether FSDP2, if it shards, leaves the replicas to a method, see :func:`with_replicas`."""
    config: ParallelismConfig | None = accelerator.parallelism_config
    return config is not None and REPLICAS not in config.fsdp_dim_names


def replicas_of(accelerator: Accelerator) -> DeviceMesh | None:
    """Returns the dimension of the replicas of the Accelerator's device mesh; None if it has none."""
    mesh: DeviceMesh | None = accelerator.torch_device_mesh
    return mesh[REPLICAS] if mesh is not None and REPLICAS in (mesh.mesh_dim_names or ()) else None


def prepare_beside_sharded(accelerator: Accelerator, given: list[Any]) -> list[Any]:
    """Prepares what belongs to a model that is sharded already.

    Accelerate would look up the parameters of its optimizers by their addresses, and all empty shards share one.
    """
    prepared = [accelerator.prepare_optimizer(one) if isinstance(one, Optimizer) else one for one in given]
    for index, one in enumerate(prepared):
        if isinstance(one, nn.Module):
            if not contains(prepared_models(accelerator), one):
                prepared_models(accelerator).append(one)
        elif isinstance(one, DataLoader):
            prepared[index] = accelerator.prepare_data_loader(one)
        elif isinstance(one, LRScheduler):
            prepared[index] = accelerator.prepare_scheduler(one)
    for one in prepared:
        if isinstance(one, (Optimizer, AcceleratedScheduler)):
            mark_prepared(one)
    return prepared


def _plugin(settings: dict[str, Any]) -> FullyShardedDataParallelPlugin | None:
    if (plugin := settings.get("fsdp_plugin")) is not None:
        return plugin
    return FullyShardedDataParallelPlugin() if _is_set("ACCELERATE_USE_FSDP") else None


def _parallelism(settings: dict[str, Any]) -> ParallelismConfig | None:
    if (config := settings.get("parallelism_config")) is not None:
        return config
    if not _is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    return ParallelismConfig()


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"
