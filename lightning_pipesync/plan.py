"""The former name of ``lightning_pipesync.lab.plan``, of which ``lightning_pipesync.plan.twin`` is public."""

import warnings

from lightning_pipesync.lab import plan

__path__ = plan.__path__

warnings.warn(
    "lightning_pipesync.plan is lightning_pipesync.lab.plan now; the former name works for one release.",
    FutureWarning,
    stacklevel=2,
)
