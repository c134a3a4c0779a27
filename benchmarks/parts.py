"""The parts of a training step in pictures."""

from __future__ import annotations

from typing import Any

from lightning_pipesync.lab.bench.pictures import COLOURS

#: What a step is made of.
OF_PARTS = {
    "forward": COLOURS[3],
    "backward": COLOURS[1],
    "reduce-scatter": COLOURS[2],
    "all-gather": COLOURS[5],
    "all-reduce": COLOURS[4],
    "update": COLOURS[6],
    "exposed communication": COLOURS[2],
}


def draw_span(panel: Any, row: float, start: float, end: float, kind: str, number: int) -> None:
    """Draws a part of a step as a bar of a timeline, those with successive numbers in alternating shades."""
    alpha = 0.95 if number % 2 else 0.6
    panel.barh(row, end - start, left=start, height=0.8, color=OF_PARTS[kind], alpha=alpha)
