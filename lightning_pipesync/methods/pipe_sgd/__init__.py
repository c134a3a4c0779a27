"""Pipe-SGD: the all-reduce of one step runs under the next; gradients are exactly k steps stale."""

from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.runtime import PipeSGD

__all__ = ["PipeSGD", "PipeSGDConfig"]
