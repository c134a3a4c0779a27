"""SelSync: local steps, synchronized only when some rank's gradient changes by more than delta."""

from lightning_pipesync.methods.replicas.gradient_change import GradientChangeTracker, SyncDecision
from lightning_pipesync.methods.selsync.config import SelSyncConfig
from lightning_pipesync.methods.selsync.runtime import SelSync

__all__ = ["GradientChangeTracker", "SelSync", "SelSyncConfig", "SyncDecision"]
