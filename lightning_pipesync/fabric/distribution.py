"""What the strategies import of Lightning's Fabric: of ``lightning_fabric`` if ``lightning`` is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_pipesync.core.extras import check_extra, is_installed

if not is_installed("lightning_fabric"):
    check_extra("lightning", "lightning_pipesync.fabric")

if TYPE_CHECKING or is_installed("lightning"):
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision, TorchCheckpointIO
    from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    from lightning.fabric.utilities import init as init_utilities
    from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
    from lightning.fabric.utilities.seed import pl_worker_init_function
else:
    from lightning_fabric.accelerators import Accelerator
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, Precision, TorchCheckpointIO
    from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    from lightning_fabric.utilities import init as init_utilities
    from lightning_fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
    from lightning_fabric.utilities.seed import pl_worker_init_function

__all__ = [
    "STRATEGY_REGISTRY",
    "Accelerator",
    "CheckpointIO",
    "ClusterEnvironment",
    "DDPStrategy",
    "Precision",
    "TorchCheckpointIO",
    "init_utilities",
    "pl_worker_init_function",
    "rank_zero_info",
    "rank_zero_warn",
]
