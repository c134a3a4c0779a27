"""Modules that communicate within forward and backward passes, beside a method that communicates under these passes."""

from __future__ import annotations

import warnings

from torch import nn

from lightning_pipesync.core.comm.transport import Transport

#: Names in the warning; a ResNet-50 has 53.
MAX_NAMES = 3


def warn_of_sync_batch_norm(method: str, module: nn.Module, transport: Transport) -> None:
    """Warns on rank 0 if ``module`` has ``SyncBatchNorm`` and ``method`` communicates over NCCL.

    NCCL's kernels wait for their peers. So operations of two groups must be issued in the same order on all ranks
    (NCCL's user guide, "Using multiple NCCL communicators concurrently"), and those of two threads are not.
    """
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if not names or transport.rank or transport.world_size == 1 or transport.backend != "nccl":
        return
    listed = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    warnings.warn(
        f"{method} communicates over NCCL while the forward and backward passes run, in which SyncBatchNorm ({listed}) "
        "communicates, too. Ranks that issue the two in different orders wait for each other for ever. Use BatchNorm, "
        "or Gloo: backend='gloo', in strategies process_group_backend='gloo'.",
        stacklevel=3,
    )
