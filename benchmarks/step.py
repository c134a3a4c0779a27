"""``python -m benchmarks.step``: ``pipesync bench step``, beside the baselines of the papers, too."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import benchmarks.baselines  # noqa: F401 - adds them to what can be compared
from benchmarks import command
from lightning_pipesync.lab.bench import step


@dataclass(frozen=True, kw_only=True)
class Step(step.Step):
    """Times a training step by method, compared with DDP, FSDP2, ZeRO, the papers' baselines and the limits.

    Attributes:
        methods: What is compared: ddp, fsdp2, zero; serial, wfbp, mg-wfbp, horovod, horovod-bo, byte-scheduler and ps,
            the papers' baselines; dear-rs and dear-ag, half of DeAR; and methods of this package, each with settings
            if need be, as with `pipesync bench step`.
        bucket_mb: Bucket sizes in MiB of DDP, of methods with buckets whose settings choose no size, and of
            ByteScheduler's pieces; the baseline is DDP with its best size.
    """


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.step:Step"))
