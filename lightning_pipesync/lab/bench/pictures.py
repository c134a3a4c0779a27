"""Pictures in one palette, laid out and saved alike. matplotlib is imported when one is drawn."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, Literal

from lightning_pipesync.training.registry import METHODS, resolve

#: Distinct to the color-blind (M. Okabe and K. Ito, "Color Universal Design", 2008). The first one is for what others
#: are compared with, and for limits.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

#: They tell methods and their settings apart in black and white.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
LINES = ("-", "--", ":", "-.", (0, (7, 3)), (0, (6, 2, 1, 2, 1, 2)))

#: What other methods are compared with, on several ranks and on one.
REFERENCES = ("ddp", "sgd")

_LEGENDS = {"below": "outside lower center", "above": "outside upper right"}


def look_of(method: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the colour and the marker of a method of this package or a reference, the same in all pictures.

    Methods of ``others`` get the next ones, in this order.
    """
    number = 0 if method in REFERENCES else 1 + [*METHODS, *others].index(method)
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def looks_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the look of the curve of each name: that of its method, and a line style for its settings.

    A name is that of a command or of a table: ``selsync:delta=0.1``, ``SelSync, local step``.
    """
    methods = {name: _method_of(name) for name in names}
    others = [method for method in dict.fromkeys(methods.values()) if method not in METHODS]
    found, counts = dict[str, dict[str, Any]](), Counter[str]()
    for name, method in methods.items():
        found[name] = {**look_of(method, others), "linestyle": LINES[counts[method] % len(LINES)]}
        counts[method] += 1
    return found


def markers_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the look of the marker of each name, without a line: of a method's further settings it is not filled."""
    looks = looks_of(names)
    return {
        name: {**look, "linestyle": "", "fillstyle": "full" if look["linestyle"] == LINES[0] else "none"}
        for name, look in looks.items()
    }


def _method_of(name: str) -> str:
    """Returns the method of a name, which has capitals, blanks and hyphens in a table."""
    method, _ = resolve(re.sub("[ -]", "_", re.split("[:,(]", name)[0].strip().lower()), {})
    return method


def colour_and_line(number: int) -> dict[str, Any]:
    """Returns the colour and the line style of the curve of a number, from 0, where there may be many."""
    colours = COLOURS[1:]
    return {"color": colours[number % len(colours)], "linestyle": LINES[number // len(colours) % len(LINES)]}


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

    A logarithmic axis whose limits are not positive, as nothing is drawn on it, becomes linear.
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
    for panel in panels.flat:
        for axis in (panel.xaxis, panel.yaxis):
            if axis.get_scale() == "log" and not all(0 < end < inf for end in axis.get_view_interval()):
                panel.set(**{f"{axis.axis_name}scale": "linear"})  # matplotlib raises otherwise
    if legend == "panel":
        panels[0, 0].legend(fontsize="small")
    elif legend is not None:
        labelled = [zip(*panel.get_legend_handles_labels(), strict=True) for panel in panels.flat]
        handles = {label: handle for pairs in labelled for handle, label in pairs}
        handles |= {label: Patch(color=color) for label, color in (patches or {}).items()}
        where: Any = {"loc": _LEGENDS[legend], "ncols": legend_columns}
        figure.legend(handles.values(), handles.keys(), fontsize="small", **where)
    figure.savefig(path, dpi=150)
