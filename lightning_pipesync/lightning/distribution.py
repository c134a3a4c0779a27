"""What the strategies import of Lightning's Trainer: of ``pytorch_lightning`` if ``lightning`` is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_pipesync.core.extras import check_extra, is_installed

check_extra("lightning", "lightning_pipesync.lightning")

if TYPE_CHECKING or is_installed("lightning"):
    from lightning.pytorch import Callback
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:
    from pytorch_lightning import Callback
    from pytorch_lightning.accelerators import Accelerator
    from pytorch_lightning.plugins import Precision
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

__all__ = ["Accelerator", "Callback", "DDPStrategy", "Precision", "StrategyRegistry", "is_param_in_hook_signature"]
