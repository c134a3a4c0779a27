"""Checks that the launched processes are those that were configured."""

from __future__ import annotations

import os
import warnings

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType

from lightning_pipesync.accelerate.plugin import METHOD_VARIABLE, NUM_PROCESSES_VARIABLE, PipeSyncPlugin
from lightning_pipesync.accelerate.sharding import leaves_replicas, shards_by_fsdp2
from lightning_pipesync.core.faults.lighthouse import ADDRESS
from lightning_pipesync.methods.settings import check_launch
from lightning_pipesync.training.registry import METHODS

#: Distributed types whose processes hold the whole model each.
DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def check_num_processes(num_processes: int) -> None:
    """Checks that the number of processes is the configured one; otherwise each would silently train alone."""
    asked = os.environ.get(NUM_PROCESSES_VARIABLE)
    if asked is not None and int(asked) != num_processes:
        raise ValueError(
            f"The configuration asks for num_processes={asked}, and this is one of {num_processes}. Set "
            "'distributed_type: MULTI_GPU', also for processes on the CPU ('use_cpu: true'); MULTI_CPU and --cpu "
            "silently start one process."
        )
    # accelerate launch sets these and WORLD_SIZE for several processes; if it starts only one, WORLD_SIZE is missing.
    launched = all(name in os.environ for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"))
    if num_processes == 1 and launched and "WORLD_SIZE" not in os.environ:
        warnings.warn(
            "accelerate launch seems to have been asked for several processes, and has started this one only, as it "
            "does with --cpu and MULTI_CPU. Nothing is synchronized. Use --multi_gpu or 'distributed_type: MULTI_GPU', "
            "also for the CPU, with 'use_cpu: true'.",
            stacklevel=3,
        )


def check_method(plugin: PipeSyncPlugin | None) -> None:
    """Checks that replicas that a launcher has started as jobs of their own train together."""
    if plugin is not None:
        check_launch(plugin.method_type.__name__, plugin.config)
    elif address := os.environ.get(ADDRESS):
        having = [name for name, method in METHODS.items() if "lighthouse" in method.config_type.__dataclass_fields__]
        names = " or ".join(having)
        raise ValueError(
            f"{ADDRESS}={address} is set, as by `pipesync launch`, for replicas that come and go, and no method: set "
            f"{METHOD_VARIABLE}={names}, or create PipeSyncAccelerator(PipeSyncPlugin({names!r}))."
        )


def check_support(accelerator: Accelerator) -> None:
    """Checks that every process holds a whole model or its shard of one, and that no communication hook is set."""
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"comm_hook={handler.comm_hook.value!r} is for DistributedDataParallel, which the method replaces: remove "
            "it, and set compression= of the method instead."
        )
    if shards_by_fsdp2(accelerator) and leaves_replicas(accelerator):
        return
    if accelerator.distributed_type not in DATA_PARALLEL:
        raise ValueError(
            f"distributed_type={accelerator.distributed_type.value} is not supported by the methods of "
            "lightning-pipesync, which replace DistributedDataParallel: use MULTI_GPU, FSDP with fsdp_version=2 and a "
            "parallelism_config, set when the process creates its first Accelerator, or no method."
        )


def ranks_of_host() -> int:
    """Returns how many processes were launched on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
