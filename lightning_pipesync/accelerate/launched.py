"""Whether the processes that were launched are those that were asked for."""

from __future__ import annotations

import os
import warnings

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType

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
    launched = all(name in os.environ for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"))
    if num_processes == 1 and launched and "WORLD_SIZE" not in os.environ:
        warnings.warn(
            "accelerate launch seems to have been asked for several processes, and has started this one only, as it "
            "does with --cpu and MULTI_CPU: use --multi_gpu, or 'distributed_type: MULTI_GPU', also for the CPU, with "
            "'use_cpu: true'. Nothing is synchronized.",
            stacklevel=3,
        )


def check_support(accelerator: Accelerator) -> None:
    """Checks that every process holds the whole model, as the methods need, and that nothing is asked of DDP.

    Raises:
        ValueError: something else was configured.
    """
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"comm_hook={handler.comm_hook.value!r} is DistributedDataParallel's, whose place the method takes: leave "
            "it out, and set compression= of the method instead."
        )
    if accelerator.distributed_type not in DATA_PARALLEL:
        raise ValueError(
            f"distributed_type={accelerator.distributed_type.value} and a method of lightning-pipesync do not go "
            "together: the methods take the place of DistributedDataParallel. Use MULTI_GPU, or no method."
        )


def ranks_of_host() -> int:
    """Returns how many processes were launched on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
