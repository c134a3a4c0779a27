"""Kernel density estimates of the values of tensors, on a common grid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

#: The layer that is shown, by task: a convolution, and for the language model a norm, as in SelSync's Fig. 3.
LAYERS = {"digits": "2.weight", "signals": "4.weight", "mnist1d": "3.1.weight", "topics": "layers.0.norm1.weight"}
#: The number of points of a grid, and the share of the values of the first tensor that lie within it.
NUM_POINTS, SHARE = 61, 0.99
#: So many values of a tensor, evenly chosen, are enough for a smooth curve.
MOST_VALUES = 4000


def check_layer(task: str) -> None:
    """Raises a ValueError if a task has no layer in :data:`LAYERS`."""
    if task not in LAYERS:
        raise ValueError(f"task={task!r} is not known; there are {', '.join(LAYERS)}.")


def density_of(tensors: Sequence[Tensor]) -> tuple[list[float], list[list[float]]]:
    """Returns a grid around 0, and the density of the values of each tensor at its points, with four digits.

    The grid is that of the first tensor. Of a tensor whose values are all the same the density is 0.
    """
    from scipy.stats import gaussian_kde

    end = float(np.quantile(np.abs(tensors[0].numpy()), SHARE))
    grid = np.linspace(-end, end, NUM_POINTS)
    densities = []
    for tensor in tensors:
        values = tensor.numpy().ravel()
        values = values[:: -(-len(values) // MOST_VALUES)]
        density = gaussian_kde(values)(grid) if values.std() > 0 else np.zeros_like(grid)
        densities.append(_short(density))
    return _short(grid), densities


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
