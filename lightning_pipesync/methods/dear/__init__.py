"""DeAR: the all-reduce in two halves, hidden under the backward pass and the next forward pass."""

from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.runtime import DeAR

__all__ = ["DeAR", "DeARConfig"]
