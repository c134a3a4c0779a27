"""Pictures in one palette, laid out and saved alike. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning_pipesync.training.registry import METHODS

#: Distinct to the color-blind (M. Okabe and K. Ito, "Color Universal Design", 2008). The first one is for what others
#: are compared with, and for limits.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

#: What a step is made of, in timelines.
OF_PARTS = {
    "forward": COLOURS[3],
    "backward": COLOURS[1],
    "reduce-scatter": COLOURS[2],
    "all-gather": COLOURS[5],
    "all-reduce": COLOURS[4],
}
_LEGENDS = {"below": "outside lower center", "above": "outside upper right"}


def colour_of(method: str) -> str:
    """Returns the colour of a method, the same in all plans; DDP's is the first."""
    return COLOURS[["ddp", *METHODS].index(method) % len(COLOURS)]


def colour_and_line(number: int) -> dict[str, Any]:
    """Returns the colour and the line style of the curve of a number, from 0, where there may be many."""
    colours = COLOURS[1:]
    return {"color": colours[number % len(colours)], "linestyle": ("-", "--", ":", "-.")[number // len(colours) % 4]}


@contextmanager
def picture(
    path: Path,
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    *,
    legend: Literal["panel", "below", "above"] | None = None,
    legend_columns: int = 2,
    patches: Mapping[str, str] | None = None,
    **shared: Any,
) -> Iterator[Any]:
    """Yields ``rows`` times ``columns`` of matplotlib's ``Axes``, and saves them after the block.

    ``size`` is in inches. A legend below or above all panels covers no curve, and has the labels of all and
    ``patches``: colours by label. ``shared`` are ``sharex`` and ``sharey`` of ``Figure.subplots``.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.rcsetup import cycler

    figure = Figure(figsize=size, layout="constrained")
    with rc_context({"axes.prop_cycle": cycler(color=COLOURS[1:])}):
        panels = figure.subplots(rows, columns, squeeze=False, **shared)
    yield panels
    if legend == "panel":
        panels[0, 0].legend(fontsize="small")
    elif legend is not None:
        labelled = [zip(*panel.get_legend_handles_labels(), strict=True) for panel in panels.flat]
        handles = {label: handle for pairs in labelled for handle, label in pairs}
        handles |= {label: Patch(color=color) for label, color in (patches or {}).items()}
        where: Any = {"loc": _LEGENDS[legend], "ncols": legend_columns}
        figure.legend(handles.values(), handles.keys(), fontsize="small", **where)
    figure.savefig(path, dpi=150)


def draw_span(panel: Any, row: float, start: float, end: float, kind: str, number: int) -> None:
    """Draws a part of a step as a bar of a timeline, those with successive numbers in alternating shades."""
    alpha = 0.95 if number % 2 else 0.6
    panel.barh(row, end - start, left=start, height=0.8, color=OF_PARTS[kind], alpha=alpha)
