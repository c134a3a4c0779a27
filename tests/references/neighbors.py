"""The mixing matrix of a round of gossip, and how fast it brings replicas together."""

from __future__ import annotations

import math

import numpy as np

from lightning_pipesync.methods.replicas.groups import neighborhood
from lightning_pipesync.methods.replicas.settings import Neighbors


def mixing_matrix(neighbors: Neighbors, number: int, round_: int = 0) -> np.ndarray:
    """Returns W of a round, of shape ``[number, number]``."""
    matrix = np.zeros((number, number))
    for replica in range(number):
        members = neighborhood(neighbors, replica, number, round_)
        matrix[replica, members] = 1 / len(members)
    return matrix


def contraction(neighbors: Neighbors, number: int) -> float:
    """Returns the factor by which a round shrinks the spread of the replicas: 0 if they are equal afterwards.

    The spread is the root of the mean squared distance of the replicas to their average. On a ring this is the second
    largest eigenvalue of W in magnitude, which the factor of each round approaches and never exceeds. For random pairs
    it is the root of the second largest eigenvalue of E[W'W] (Boyd et al., "Randomized Gossip Algorithms", 2006), which
    is that of E[W], as W W = W: the mean over draws of the squared factor, for any weights, since a pair is drawn with
    the same probability as any other. 1 minus it is the spectral gap.
    """
    if len(neighborhood(neighbors, 0, number, 0)) == number:
        return 0.0
    if neighbors == "ring":  # the eigenvalues are (1 + 2 cos(2 pi k / number)) / 3, and -1/3 at least
        return (1 + 2 * math.cos(2 * math.pi / number)) / 3
    # W_ij is 1/2 with the probability of that pair: 1 / (number - 1), of an odd number 1 / number.
    return math.sqrt(0.5 if number % 2 else (number - 2) / (2 * (number - 1)))
