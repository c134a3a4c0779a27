"""EA-Pipe: pipeline parallelism with a replica of the weights for each mini-batch in flight, pulled together."""

from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.runtime import EAPipe

__all__ = ["EAPipe", "EAPipeConfig"]
