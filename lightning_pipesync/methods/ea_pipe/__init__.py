"""EA-Pipe: pipeline parallelism with elastic averaging of one weight replica per mini-batch in flight."""

from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.runtime import EAPipe

__all__ = ["EAPipe", "EAPipeConfig"]
