"""The former name of ``lightning_pipesync.lab.netlab``, for one release."""

import warnings

from lightning_pipesync.lab.netlab import *  # noqa: F403

warnings.warn(
    "lightning_pipesync.netlab is lightning_pipesync.lab.netlab now; the former name works for one release.",
    FutureWarning,
    stacklevel=2,
)
