"""Whether the processes that were launched are those that were asked for."""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType

from lightning_pipesync.accelerate.plugin import NUM_PROCESSES_VARIABLE

#: Kinds of launches of which every process holds the whole model.
DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def check_num_processes(num_processes: int) -> None:
    """Checks that there are as many processes as the launcher was asked for.

    Raises:
        ValueError: there are others: each would train by itself, and say nothing.
    """
    asked = os.environ.get(NUM_PROCESSES_VARIABLE)
    if asked is not None and int(asked) != num_processes:
        raise ValueError(
            f"The configuration asks for num_processes={asked}, and this is one of {num_processes}. Say "
            "'distributed_type: MULTI_GPU' in it, also for processes on the CPU ('use_cpu: true'); MULTI_CPU and --cpu "
            "start one process without a word."
        )
    # accelerate launch sets these together for several processes, but for the number of them if it starts only one.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    if num_processes == 1 and launched and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "accelerate launch was asked for several processes, and has started this one only, as it does with --cpu "
            "and MULTI_CPU: use --multi_gpu, or 'distributed_type: MULTI_GPU', also for the CPU, with 'use_cpu: true'."
        )


def check_support(accelerator: Accelerator) -> None:
    """Checks that every process holds the whole model, as the methods need.

    Raises:
        ValueError: something else was configured.
    """
    if accelerator.distributed_type not in DATA_PARALLEL:
        raise ValueError(
            f"distributed_type={accelerator.distributed_type.value} and a method of lightning-pipesync do not go "
            "together: the methods take the place of DistributedDataParallel. Use MULTI_GPU, or no method."
        )


def ranks_of_host() -> int:
    """Returns how many processes were launched on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
