"""The GPUs of this machine, shared out between its replicas."""

from __future__ import annotations

import os
from itertools import takewhile

import torch

VARIABLE = "CUDA_VISIBLE_DEVICES"


def share_devices(replicas: int, ranks_per_replica: int) -> list[str | None]:
    """Returns the value of ``CUDA_VISIBLE_DEVICES`` for each replica; None on a machine without GPUs.

    Each replica gets as many, in order; some may be left.

    Raises:
        ValueError: there are GPUs, and fewer than ranks.
    """
    devices = _visible()
    if not devices:
        return [None] * replicas
    each = len(devices) // replicas
    if each < ranks_per_replica:
        raise ValueError(
            f"--replicas {replicas} --ranks_per_replica {ranks_per_replica} needs {replicas * ranks_per_replica} GPUs, "
            f"and there are {len(devices)}: start fewer here, or set {VARIABLE}= to train on the CPU."
        )
    return [",".join(devices[number * each : (number + 1) * each]) for number in range(replicas)]


def _visible() -> list[str]:
    """Returns the names of the GPUs that this process may use."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    # CUDA takes those before the first that there cannot be, such as -1.
    return [*takewhile(lambda name: not name.startswith("-"), filter(None, map(str.strip, given.split(","))))]
