"""The colours of all pictures: distinct to the color-blind (M. Okabe and K. Ito, "Color Universal Design", 2008)."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from lightning_pipesync.training.registry import METHODS

#: The first one is for what others are compared with, and for limits.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

#: What a step is made of, in timelines.
OF_PARTS = {
    "forward": COLOURS[3],
    "backward": COLOURS[1],
    "reduce-scatter": COLOURS[2],
    "all-gather": COLOURS[5],
    "all-reduce": COLOURS[4],
}


def colour_of(method: str) -> str:
    """Returns the colour of a method, the same in all plans; DDP's is the first."""
    return COLOURS[["ddp", *METHODS].index(method) % len(COLOURS)]


def colour_and_line(number: int) -> dict[str, Any]:
    """Returns the colour and the line style of the curve of a number, from 0, where there may be many."""
    own = COLOURS[1:]
    return {"color": own[number % len(own)], "linestyle": ("-", "--", ":", "-.")[number // len(own) % 4]}


class Picture(Figure):
    """A figure whose panels draw in these colours, but for the first."""

    def add_subplot(self, *args: Any, **kwargs: Any) -> Any:
        """Adds a panel; arguments are matplotlib's."""
        with rc_context({"axes.prop_cycle": cycler(color=COLOURS[1:])}):
            return super().add_subplot(*args, **kwargs)
