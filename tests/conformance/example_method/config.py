"""The settings of gradient averaging."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipesync.methods.setting_types import MiB, Seconds
from lightning_pipesync.methods.settings import Settings


@dataclass(frozen=True)
class AveragingConfig(Settings):
    """Settings of gradient averaging."""

    bucket_mb: MiB = 25.0
    """Maximum MiB of gradients that are averaged in one collective."""

    timeout_s: Seconds = 1800.0
    """Seconds after which a rank that does not answer counts as lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bucket_mb", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)!r}.")
