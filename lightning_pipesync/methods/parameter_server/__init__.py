"""SGD with parameter servers, from K-sync to stale-synchronous parallel."""

from lightning_pipesync.methods.parameter_server.config import ParameterServerConfig
from lightning_pipesync.methods.parameter_server.runtime import ParameterServer

__all__ = ["ParameterServer", "ParameterServerConfig"]
