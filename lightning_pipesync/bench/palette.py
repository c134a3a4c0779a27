"""The colours of all pictures: distinct to the color-blind (M. Okabe and K. Ito, "Color Universal Design", 2008)."""

from __future__ import annotations

from lightning_pipesync.training.registry import METHODS

#: The first one is for what others are compared with, and for limits.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def colour_of(method: str) -> str:
    """Returns the colour of a method, the same in all pictures; DDP's is the first."""
    return COLOURS[["ddp", *METHODS].index(method) % len(COLOURS)]
