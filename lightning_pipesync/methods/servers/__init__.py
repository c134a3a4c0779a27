"""SGD with parameter servers, from K-sync to stale-synchronous parallel."""

from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.runtime import ParameterServer

__all__ = ["ParameterServer", "ParameterServerConfig"]
